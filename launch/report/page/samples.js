// Episodes: found by what they are, read turn by turn, each token coloured by what was known of it.
const UNKNOWN = -32768;
const NEWEST_FIRST = [["newest", "newest first"], ["oldest", "oldest first"], ["low", "lowest reward first"], ["high", "highest reward first"], ["long", "longest first"], ["stale", "stalest first"]];
const COLOURINGS = {
  probability: { title: "probability when sampled", low: "0", high: "1", ramp: ["rgb(220 50 40 / .55)", "rgb(240 170 40 / .4)", "rgb(60 170 90 / .12)"] },
  ratio: { title: "probability now / when sampled", low: "½", high: "2", ramp: ["rgb(50 100 230 / .55)", "rgb(128 128 128 / .05)", "rgb(220 50 40 / .55)"] },
  advantage: { title: "advantage", low: "negative", high: "positive", ramp: ["rgb(220 50 40 / .5)", "rgb(128 128 128 / .05)", "rgb(40 160 80 / .5)"] },
  entropy: { title: "entropy (nats)", low: "0", high: "2", ramp: ["rgb(128 128 128 / .04)", "rgb(160 90 220 / .35)", "rgb(160 60 230 / .6)"] },
  version: { title: "version that sampled it", low: "oldest here", high: "newest here", ramp: ["rgb(240 150 40 / .5)", "rgb(128 128 128 / .15)", "rgb(40 130 220 / .45)"] },
  mask: { title: "in the loss; bounded; sampled, not in the loss", low: "in the loss", high: "bounded by the loss", ramp: ["rgb(40 160 80 / .3)", "rgb(128 128 128 / .3)", "rgb(220 50 40 / .55)"] },
};
const lookup = { colouring: "probability", beside: false, chosen: null, order: "newest", filters: {} };

views.samples = async (main, run) => {
  const { episodes, kept } = run.samples;
  if (!episodes.length) {
    main.append(el("p", { class: "hint" }, "No episode was kept: tracking.samples sets the share of training groups whose conversations are."));
    return;
  }

  const tokens = await arraysOf("samples");
  let start = 0;
  for (const episode of episodes) {
    episode.start = start;
    episode.staleness = episode.step === null ? null : episode.step - episode.oldest;
    start += episode.tokens;
  }

  const list = el("div", { class: "list", role: "listbox", "aria-label": "episodes" });
  const talk = el("div", { class: "panel talk" });
  const count = el("span", { class: "hint" });
  const note = kept > episodes.length ? el("p", { class: "hint" }, `${whole(episodes.length)} of ${whole(kept)} kept episodes are in this file: whole groups, evenly spread`) : "";
  main.append(note, filterBar(run, () => fill()), count, el("div", { class: "samples" }, list, talk));

  let found = [];
  const open = (episode, focus = false) => {
    lookup.chosen = episode;
    for (const row of list.children) row.setAttribute("aria-current", row.episode === episode);
    const row = [...list.children].find((each) => each.episode === episode);
    if (row && focus) row.scrollIntoView({ block: "nearest" });
    talk.replaceChildren(...conversationPanel(run, tokens, episode, () => open(episode)));
  };

  const fill = () => {
    found = sorted(episodes.filter((episode) => fits(run, tokens, episode)));
    count.textContent = `${whole(found.length)} of ${whole(episodes.length)} episodes`;
    list.replaceChildren(...found.slice(0, 300).map((episode) => {
      const row = el("button", { type: "button", click: () => open(episode) },
        el("b", { class: episode.success ? "good" : "bad" }, `${episode.success ? "✓" : "✗"} ${short(episode.reward)}`),
        `${episode.kind} · task ${episode.task_index}${episode.group_id < 0 ? "" : ` · group ${episode.group_id}`}`, el("br"),
        el("small", {}, `${episode.stop_reason} · ${whole(episode.generated)} of ${whole(episode.tokens)} tokens · ${episode.step === null ? `version ${episode.newest}` : `step ${episode.step}, stale ${episode.staleness}`}`));
      row.episode = episode;
      return row;
    }));
    if (found.length > 300) list.append(el("p", { class: "hint" }, " the first 300; narrow the search for more"));
    if (found.length) open(found.includes(lookup.chosen) ? lookup.chosen : found[0]);
    else talk.replaceChildren(el("p", { class: "hint" }, "no episode fits"));
  };

  views.samples.step = (by) => {
    const place = Math.min(found.length - 1, 299, Math.max(0, found.indexOf(lookup.chosen) + by));
    if (found[place]) open(found[place], true);
  };
  fill();
};

function filterBar(run, changed) {
  const set = (name) => (event) => {
    lookup.filters[name] = event.target.value;
    changed();
  };
  const pick = (name, label, values) => choice(label, [["", "any"], ...values.map((value) => [value, value])], lookup.filters[name] || "", (value) => {
    lookup.filters[name] = value;
    changed();
  });
  const number = (name, label, step = 1) => el("label", {}, `${label} `, el("input", { type: "number", step, value: lookup.filters[name], change: set(name) }));
  const { episodes } = run.samples;
  const distinct = (name) => [...new Set(episodes.map((episode) => episode[name]))].sort();
  const types = [...new Set(episodes.flatMap((episode) => episode.types))].sort();
  const summary = el("summary");
  const told = () => {
    const count = Object.values(lookup.filters).filter((value) => value !== "" && value !== undefined).length;
    summary.textContent = count ? `Filters (${count} set)` : "Filters";
  };
  told();
  const bar = el("div", { class: "controls", change: told },
    pick("success", "solved", ["yes", "no"]), pick("kind", "kind", distinct("kind")), pick("end", "ended by", distinct("stop_reason")), types.length ? pick("type", "type of task", types) : "",
    number("task", "task"), number("group", "group"), number("step", "step"),
    number("least", "reward ≥", "any"), number("most", "reward ≤", "any"), number("tokens", "tokens ≥"), number("staleness", "staleness ≥"),
    el("label", {}, "text ", el("input", { type: "search", value: lookup.filters.text, change: set("text") })),
    choice("", NEWEST_FIRST, lookup.order, (value) => {
      lookup.order = value;
      changed();
    }));
  return el("details", { class: "filters", open: innerWidth > 720 }, summary, bar);
}

function fits(run, tokens, episode) {
  const wanted = Object.fromEntries(Object.entries(lookup.filters).filter(([, value]) => value !== "" && value !== undefined));
  const same = (name, value) => wanted[name] === undefined || String(value) === wanted[name];
  const least = (name, value) => wanted[name] === undefined || value >= Number(wanted[name]);
  return same("kind", episode.kind) && same("end", episode.stop_reason) && (wanted.type === undefined || episode.types.includes(wanted.type)) && same("task", episode.task_index) && same("group", episode.group_id)
    && same("step", episode.step === null ? episode.newest : episode.step)
    && least("least", episode.reward + 1e-9) && (wanted.most === undefined || episode.reward <= Number(wanted.most) + 1e-9)
    && least("tokens", episode.tokens) && (wanted.staleness === undefined || (episode.staleness !== null && least("staleness", episode.staleness)))
    && same("success", episode.success ? "yes" : "no")
    && (wanted.text === undefined || textOf(run, tokens, episode, 0, episode.tokens).toLowerCase().includes(wanted.text.toLowerCase()));
}

function sorted(episodes) {
  const keys = { low: (e) => e.reward, high: (e) => -e.reward, long: (e) => -e.tokens, stale: (e) => -(e.staleness ?? -1) };
  if (lookup.order === "newest") return episodes.reverse();
  return keys[lookup.order] ? episodes.sort((a, b) => keys[lookup.order](a) - keys[lookup.order](b)) : episodes;
}

const textAt = (run, tokens, episode, place) => episode.pieces[place] ?? run.samples.texts[tokens.place[episode.start + place]];

function textOf(run, tokens, episode, from, to) {
  let text = "";
  for (let place = from; place < to; place++) text += textAt(run, tokens, episode, place);
  return text;
}

function conversationPanel(run, tokens, episode, redraw) {
  const group = run.samples.episodes.filter((other) => episode.kind === "train" && other.kind === "train" && other.group_id === episode.group_id);
  const shown = lookup.beside && group.length > 1 ? group : [episode];
  const inspect = el("div", { class: "inspect" }, "point at a token, or tap it");
  const { title, low, high, ramp } = COLOURINGS[lookup.colouring];
  const scale = el("span", { class: "scale" });
  scale.style.background = `linear-gradient(to right, ${ramp.join(", ")})`;

  const controls = el("div", { class: "controls" },
    choice("colour by", Object.keys(COLOURINGS).map((name) => [name, name]), lookup.colouring, (value) => {
      lookup.colouring = value;
      redraw();
    }),
    el("span", { class: "hint" }, `${title}: ${low}`, scale, high),
    group.length > 1 ? el("button", { type: "button", "aria-pressed": String(lookup.beside), click: () => {
      lookup.beside = !lookup.beside;
      redraw();
    } }, lookup.beside ? "this one alone" : `all ${group.length} members side by side`) : null);

  const describe = (event) => {
    const token = event.target.closest("s");
    if (token) inspect.textContent = tokenFacts(tokens, token.episode, token.place);
  };
  const columns = shown.map((member) => el("div", { class: "talk" }, head(member), ...turns(run, tokens, member)));
  return [controls, inspect, el("div", { class: shown.length > 1 ? "members" : "", mouseover: describe, click: describe }, columns)];
}

function head(episode) {
  const info = Object.entries(episode.info).map(([name, value]) => `${name} ${short(value)}`);
  const notes = Object.entries(episode.notes).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)));
  if (episode.unrewarded) notes.push(el("div", {}, el("dt", {}, "not rewarded"), el("dd", {}, episode.unrewarded)));
  const trained = episode.step === null ? "" : `, trained in step ${episode.step}, staleness ${episode.staleness}`;
  return el("div", {},
    el("h3", {}, `ticket ${episode.ticket_id} · task ${episode.task_index} · reward `, el("b", { class: episode.success ? "good" : "bad" }, short(episode.reward)), ` · ${episode.stop_reason}`),
    el("small", {}, `${clock(episode.seconds)}, versions ${episode.oldest}–${episode.newest}${trained}${info.length ? ` · ${info.join(", ")}` : ""}`),
    notes.length ? el("dl", { class: `notes ${episode.success ? "good" : "bad"}` }, notes) : null);
}

function* turns(run, tokens, episode) {
  let read = 0;
  const tint = tinted(tokens, episode);
  for (const [number, [start, end, reward, finish, generator]] of episode.turns.entries()) {
    if (start > read) yield el("div", { class: "turn read" }, textOf(run, tokens, episode, read, start));
    const said = el("div", { class: "turn said" });
    for (let place = start; place < end; place++) {
      const token = el("s", {}, textAt(run, tokens, episode, place));
      token.episode = episode;
      token.place = place;
      token.style.backgroundColor = tint(place);
      said.append(token);
    }
    yield said;
    yield el("small", {}, `turn ${number + 1}: reward ${short(reward)}, ${finish}, generator ${generator}`);
    read = end;
  }
  if (read < episode.tokens) yield el("div", { class: "turn read" }, textOf(run, tokens, episode, read, episode.tokens));
}

// What is known of one token, in natural units; null where it is not.
function valuesAt(tokens, episode, place) {
  const at = episode.start + place;
  const nats = (column) => (tokens[column][at] === UNKNOWN ? null : tokens[column][at] / 1000);
  const ratio = nats("ratio");
  const inLoss = ratio !== null;
  return {
    probability: Math.exp(Math.min(0, nats("logp"))),
    ratio: ratio === null ? null : Math.exp(ratio),
    advantage: inLoss ? tokens.advantage[at] : null,
    entropy: nats("entropy"),
    version: tokens.version[at],
    inLoss,
  };
}

// The colour of a token by its place. 0 … 1 runs along the ramp.
function tinted(tokens, episode) {
  const { ramp } = COLOURINGS[lookup.colouring];
  const largest = Math.max(1e-6, ...Array.from(tokens.advantage.subarray(episode.start, episode.start + episode.tokens), (v) => Math.abs(v) || 0));
  const bounded = new Set(episode.clipped);
  const order = new Map();
  for (let place = 0; place < episode.tokens; place++) if (tokens.version[episode.start + place] >= 0) order.set(place, order.size);

  const where = {
    probability: (v) => v.probability,
    ratio: (v) => (v.ratio === null ? null : 0.5 + Math.log2(v.ratio) / 2),
    advantage: (v) => (v.advantage === null ? null : 0.5 + v.advantage / largest / 2),
    entropy: (v) => (v.entropy === null ? null : v.entropy / 2),
    version: (v) => (episode.newest === episode.oldest ? 1 : (v.version - episode.oldest) / (episode.newest - episode.oldest)),
    mask: (v, place) => (bounded.has(order.get(place)) ? 1 : v.inLoss ? 0 : 0.5),
  }[lookup.colouring];

  return (place) => {
    const along = where(valuesAt(tokens, episode, place), place);
    if (along === null || Number.isNaN(along)) return "transparent";
    const position = 2 * Math.min(1, Math.max(0, along));
    const first = Math.min(1, Math.floor(position));
    return `color-mix(in srgb, ${ramp[first + 1]} ${(100 * (position - first)).toFixed(0)}%, ${ramp[first]})`;
  };
}

const idAt = (tokens, episode, place) => tokens.vocabulary.subarray(0, tokens.place[episode.start + place] + 1).reduce((sum, step) => sum + step, 0);

function tokenFacts(tokens, episode, place) {
  const v = valuesAt(tokens, episode, place);
  const learner = v.inLoss ? `ratio ${short(v.ratio)} · advantage ${short(v.advantage)} · entropy ${short(v.entropy)}` : "not in a trained batch, or not in its loss";
  return `token ${place} (id ${idAt(tokens, episode, place)}) · probability ${short(v.probability)} · version ${v.version} · ${learner}`;
}
