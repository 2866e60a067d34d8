// A page that is served follows its runs. Overview, steps and comparison are drawn anew; what somebody reads waits for them.
async function follow(meta) {
  let tag = meta.content;
  const says = el("span", { class: "hint", id: "live", role: "status" }, "live");
  const fresh = el("button", { type: "button", hidden: true, click: () => redraw() }, "show what is new");
  document.getElementById("theme").before(says, fresh);
  const redraw = async () => {
    fresh.hidden = true;
    const top = scrollY;
    await show(report.view);
    scrollTo(0, top);
  };

  for (;;) {
    await new Promise((done) => setTimeout(done, Number(meta.dataset.every)));
    if (document.hidden) continue;
    try {
      const answer = await fetch(`data?since=${tag}`);
      says.textContent = answer.status === 503 ? await answer.text() : "live";
      if (answer.status !== 200) continue;
      const news = await answer.json();
      tag = news.tag;
      await take(news.blocks);
    } catch {
      says.textContent = "nobody answers: was the server ended?";
      continue;
    }
    if (report.view === "timeline" || report.view === "samples") fresh.hidden = false;
    else await redraw();
  }
}

// The new data in the place of the old; the episode that is read stays the same one.
async function take(blocks) {
  for (const [id, block] of Object.entries(blocks)) {
    const old = document.getElementById(id);
    if (old) old.textContent = block;
    else document.body.append(el("script", { type: "text/plain", id }, block));
  }
  const read = lookup.chosen && lookup.chosen.ticket_id;
  report.blocks.clear();
  report.runs = await readFacts();
  lookup.chosen = report.runs[report.chosen].samples.episodes.find((episode) => episode.ticket_id === read) || null;
  document.querySelectorAll("#run option").forEach((option, i) => {
    option.textContent = `${report.runs[i].name} (${report.runs[i].state})`;
  });
}
