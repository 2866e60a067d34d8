// What other losses would have made of the run's own batches: `fresco lab`.
views.lab = (main, run) => {
  const lab = run.lab;
  if (!lab) return main.append(el("p", { class: "hint" }, "nothing was tried on this run: fresco lab RUN --losses …"));

  const names = lab.losses.map((loss) => loss.name);
  const head = ["loss", "gradient", ...names.map((name) => `cosine with ${name}`), "ess", "gain", "beyond trust", "CPU s"];
  const rows = lab.losses.map((loss) => [loss.name, short(loss.gradient), ...names.map((name) => (name in loss.cosine ? fixed(loss.cosine[name], 4) : "")),
    percent(loss.ess), loss.gain ? `${short(loss.gain[0])} ± ${short(loss.gain[1])}` : "", loss.beyond ? `from version ${loss.beyond}` : "", short(loss.cpu_s)]);
  const charts = [...new Set(lab.losses.flatMap((loss) => Object.keys(loss.curves)))].map((name) => [name, el("div", { class: "chart" })]);

  main.append(
    panel(`Batch ${lab.first}, from the same weights`, table(head, rows), pullTable(lab, "by_age"), pullTable(lab, "by_reward")),
    el("div", { class: "grid" }, charts.map(([name, place]) => panel(name, place, el("p", { class: "hint" }, trustNote(lab))))),
    panel("Samples that would change the update most", lab.samples.map((sample) => pulledSample(sample, names))));
  for (const [name, place] of charts) curves(place, lab.losses.flatMap((loss, i) => trusted(loss, loss.curves[name], PALETTE[i % PALETTE.length])), { smooth: false });
};

const trustNote = (lab) => {
  const left = lab.losses.filter((loss) => loss.beyond).map((loss) => `${loss.name} from version ${loss.beyond}`);
  return `broken lines: beyond trust (ess under ${lab.trust[0]}, or KL over ${lab.trust[1]})${left.length ? `: ${left.join(", ")}` : ""}`;
};

// A line up to where it can be trusted, and a broken one behind.
function trusted(loss, y, colour) {
  if (!y) return [];
  const end = loss.beyond ? loss.steps.findIndex((step) => step >= loss.beyond) : y.length;
  const near = { label: loss.name, x: loss.steps, y: y.map((value, i) => (i < end ? value : null)), colour };
  const far = { label: `${loss.name}, beyond trust`, x: loss.steps, y: y.map((value, i) => (i >= end - 1 ? value : null)), colour, dash: [3, 5] };
  return loss.beyond ? [near, far] : [near];
}

function pullTable(lab, key) {
  const keys = [...new Set(lab.losses.flatMap((loss) => Object.keys(loss[key])))].sort((a, b) => parseFloat(a) - parseFloat(b));
  const what = key === "by_age" ? "age of the token" : "reward of the sample";
  return table(["loss", ...keys], lab.losses.map((loss) => [loss.name, ...keys.map((each) => percent(loss[key][each] || 0))]), `Share of the pull by ${what}`);
}

// The conversation, each generated token shaded by how strongly the chosen loss pulls it up or down.
function pulledSample(sample, names) {
  const text = el("p", { class: "pulled" });
  const draw = (name) => {
    const pulls = new Map(sample.generated.map((place, i) => [place, (sample.pull[name] || [])[i] || 0]));
    const most = Math.max(1e-12, ...[...pulls.values()].map(Math.abs));
    text.replaceChildren(...sample.text.map((piece, place) => {
      const pull = pulls.get(place);
      if (pull === undefined) return el("span", { class: "hint" }, piece);
      const word = el("span", { title: short(pull) }, piece);
      word.style.background = `color-mix(in srgb, ${colour(pull > 0 ? "good" : "bad")} ${Math.round((60 * Math.abs(pull)) / most)}%, transparent)`;
      return word;
    }));
  };
  const shares = names.map((name) => `${name} ${percent(sample.share[name])}`).join(", ");
  return el("details", { toggle: (event) => event.target.open && draw(names[0]) },
    el("summary", {}, `group ${sample.group}, reward ${short(sample.reward)}, age ${sample.age}: ${shares}`),
    choice("pull of", names.map((name) => [name, name]), names[0], draw), text);
}
