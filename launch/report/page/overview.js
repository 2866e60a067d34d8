// What ran, what came out, where samples and time went.
const SVG = "http://www.w3.org/2000/svg";
const ENDS = { trained: "good", evaluated: "c1", stale: "c3", redundant: "c4", filtered: "c5", settled: "c7", failed: "bad", lost: "bad" };
const OF_SAMPLES = new Set(["no-diversity", "double-start", "template-drift", "judge-always", "judge-never", "truncated", "answers-cut", "unreadable", "invalid-actions", "task-type-never"]);
const OF_PROCESSES = new Set(["failing-task", "failing-episodes", "slow-server", "slow-generator", "learner-starved", "process-died", "clock"]);

views.overview = (main, run) => {
  main.append(tiles(run), alarmList(run));
  if (run.error) main.append(panel("Why it ended", el("pre", {}, run.error)));

  const held = panel("Held-out accuracy (95 % interval)", el("div", { class: "chart" }));
  const reward = panel("Reward of batches (95 % interval)", el("div", { class: "chart" }));
  const speed = panel("Tokens per second", el("div", { class: "chart" }));
  const staleness = panel("Staleness of trained samples", el("div", { class: "chart" }));
  const flows = panel("Where samples and tokens went", el("div", { class: "flows" }));
  main.append(el("div", { class: "controls" }, smoothingChoice()), alarmKey(run), el("div", { class: "grid narrow" }, held, reward, speed, staleness), taskPanels(run), flows, waitPanel(run), workPanel(run), lossPanels(run), originPanels(run));

  const rows = run.rows;
  const evaluations = run.evaluations;
  curves(held.lastChild, heldOutLines(evaluations), { percentages: true, smooth: false });
  const band = rows["reward/low"] ? { low: rows["reward/low"], high: rows["reward/high"] } : {};
  curves(reward.lastChild, [{ label: "reward", x: rows.step, y: rows["rollout/reward"], ...band }]);
  curves(speed.lastChild, [{ label: "tokens/s", x: rows.step, y: rows.tokens_per_second, colour: "c2" }]);

  const ages = Object.keys(run.staleness);
  if (ages.length) bars(staleness.lastChild, [], ages.map((age) => run.staleness[age]), { x: "versions", categories: ages });
  else staleness.lastChild.append(el("p", { class: "hint" }, "nothing was trained"));
  for (const [what, ledger] of Object.entries(run.ledger || {})) flows.lastChild.append(flow(what, ledger));
  if (!run.ledger) flows.lastChild.append(el("p", { class: "hint" }, "no batch was trained"));
};

// The accuracy (of several samples avg@k and pass@k), and that of each held-out set where there are several.
function heldOutLines(evaluations) {
  if (!evaluations.length) return [];
  const last = evaluations[evaluations.length - 1];
  const x = evaluations.map((row) => row.step);
  const line = (label, of) => {
    const [y, low, high] = [0, 1, 2].map((place) => evaluations.map((row) => (of(row) || [])[place] ?? null));
    return { label, x, y, low, high };
  };
  const named = (name) => (name === "avg" ? (last.samples > 1 ? `avg@${last.samples}` : "accuracy") : name);
  const whole = Object.keys(last.all).map((name) => line(named(name), (row) => row.all[name]));
  const sets = Object.keys(last.sets).length > 1 ? Object.keys(last.sets).map((set) => ({ ...line(set || "own", (row) => (row.sets[set] || {}).avg), low: undefined, dash: [6, 3] })) : []; // their intervals are in the table
  return [...(whole.length ? whole : [line("accuracy", (row) => [row.accuracy, row.low, row.high])]), ...sets];
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function tiles(run) {
  const rows = run.rows;
  const steps = (rows.step || []).length;
  const evaluations = run.evaluations;
  const lastReward = steps ? mean(rows["rollout/reward"].slice(-10)) : null;
  const tile = (label, value, detail, kind = "") =>
    el("div", { class: `tile ${kind}` }, el("span", {}, label), el("b", {}, value), el("small", {}, detail));
  const alarms = run.alarms.length && `${run.alarms.length} ${run.alarms.length === 1 ? "alarm" : "alarms"}`;
  const found = [
    tile("state", alarms ? `${run.state}, ${alarms}` : run.state, `${steps} of ${run.config.steps} steps in ${clock(run.seconds)}`, alarms && run.state === "finished" ? "stopped" : run.state),
  ];

  if (evaluations.length) {
    const [first, last] = [evaluations[0], evaluations[evaluations.length - 1]];
    const [gained, low, high] = (run.gain || []).map((v) => fixed(100 * v, 1));
    const simulated = run.config["generator.engine"] === "simulated"; // its answers do not depend on the weights
    const gain = run.gain && (simulated ? "simulated engines: the difference is chance" : `gain ${gained} points (${low} … ${high})`);
    const shown = evaluations.length > 1 ? `${percent(first.accuracy)} → ${percent(last.accuracy)}` : percent(last.accuracy);
    found.push(tile("held-out accuracy", shown, gain || `${percent(last.low)} … ${percent(last.high)}`));
  }
  found.push(tile("reward", short(lastReward), steps ? `last ${Math.min(10, steps)} batches; first ${short(rows["rollout/reward"][0])}` : "no batch yet"));
  found.push(tile("tokens per second", steps ? whole(mean(rows.tokens_per_second.slice(-10).filter(present))) : "–", "trained, last 10 steps"));
  const total = Object.values(run.staleness).reduce((sum, count) => sum + count, 0);
  const stale = Object.entries(run.staleness).reduce((sum, [age, count]) => sum + age * count, 0) / total;
  found.push(tile("staleness", total ? stale.toFixed(2) : "–", `alpha ${run.config["rollout.alpha"]}, ${run.violations ?? "?"} violations`));
  found.push(tile("learner waits", percent(run.summary.learner_wait_fraction), `generators idle ${percent(run.summary.generator_idle_fraction)}`));
  return el("div", { class: "tiles" }, found);
}

function alarmList(run) {
  if (!run.alarms.length) return el("p", { class: "hint" }, "no alarm was raised");
  const rows = run.alarms.map((alarm) => {
    const often = alarm.count > 1 ? `; ${whole(alarm.count)} times, last after step ${alarm.last_step}` : "";
    const when = `first after step ${alarm.step}, ${clock(alarm.time - run.started)}, by ${alarm.who}${often}`;
    return el("li", {}, el("b", {}, alarm.name), ` ${alarm.detail}`, alarmLink(run, alarm), el("small", {}, `${when}; likely cause: ${alarm.cause}; look at: ${alarm.change}`));
  });
  return panel("Alarms", el("ul", { class: "alarms" }, rows));
}

// To the view where what an alarm says can be seen.
function alarmLink(run, { name }) {
  const view = OF_SAMPLES.has(name) ? "samples" : OF_PROCESSES.has(name) ? "timeline" : "steps";
  const empty = { samples: !run.samples.episodes.length, timeline: !(run.timeline.lanes || []).length, steps: !(run.rows.step || []).length };
  return empty[view] ? null : el("button", { type: "button", class: "link", click: () => show(view) }, `see ${TITLES[view]}`);
}

// What the model fails at; a task leads to its conversations.
function taskPanels(run) {
  const { types, versions, hardest } = run.tasks;
  const bar = ({ success, low, high }) => {
    const strip = el("div", { class: "range", title: `${percent(low)} … ${percent(high)}` }, el("i"), el("b"));
    Object.assign(strip.children[0].style, { left: `${100 * low}%`, width: `${100 * (high - low)}%` });
    strip.children[1].style.left = `${100 * success}%`;
    return strip;
  };
  const before = versions.length > 1;
  const head = ["type", "tasks", ...(before ? [`version ${versions[0]}`] : []), `version ${versions[versions.length - 1]}`, "95 % interval", ""];
  const rows = types.map((row) => [row.type, whole(row.tasks), ...(before ? [percent(row.first)] : []), percent(row.success), `${percent(row.low)} … ${percent(row.high)}`, bar(row)]);
  const worst = (kind, title) => {
    const typed = hardest[kind].some((each) => each.type) ? ["type"] : [];
    const read = (task) => el("button", { type: "button", class: "link", click: () => readTask(kind, task) }, `${task}`);
    const rows = hardest[kind].map((each) => [read(each.task), `${each.solved} of ${each.tries}`, short(each.reward), ...typed.map((name) => each[name])]);
    return rows.length ? panel(title, table(["task", "solved", "reward", ...typed], rows)) : null;
  };
  const byType = panel("Held-out success by type of task, the worst first", table(head, rows));
  byType.classList.add("wide");
  return el("div", { class: "grid narrow" }, rows.length ? byType : null,
    worst("eval", "Held-out tasks solved least, in the last three evaluations"), worst("train", "Training tasks solved least, of those that were kept"));
}

function readTask(kind, task) {
  lookup.chosen = null;
  lookup.filters = { kind, task: String(task) };
  show("samples");
}

// A Sankey picture, laid out by d3-sankey (github.com/d3/d3-sankey, BSD).
function flow(what, ledger) {
  const source = "issued" in ledger ? "issued" : "generated";
  const total = ledger[source];
  const ends = Object.entries(ledger).filter(([name, count]) => name !== source && count > 0);
  const heading = el("h3", {}, `${what}: ${whole(total)} ${source}`);
  if (!ends.length) return el("div", {}, heading);

  const width = 350;
  const height = Math.max(120, 34 * ends.length);
  const layout = d3.sankey().nodeId((node) => node.name).nodeWidth(10).nodePadding(14).nodeSort(null).extent([[0, 8], [width - 180, height - 8]]);
  const names = [source, ...ends.map(([name]) => name)];
  const graph = layout({
    nodes: names.map((name) => ({ name })),
    links: ends.map(([name, count]) => ({ source, target: name, value: count })),
  });

  const svg = document.createElementNS(SVG, "svg");
  const draw = (tag, attributes, text) => {
    const node = svg.appendChild(document.createElementNS(SVG, tag));
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text) node.textContent = text;
  };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${what} by their end`);

  for (const link of graph.links) {
    const half = link.width / 2;
    const [a, b, middle] = [link.source.x1, link.target.x0, (link.source.x1 + link.target.x0) / 2];
    const top = `M${a},${link.y0 - half}C${middle},${link.y0 - half} ${middle},${link.y1 - half} ${b},${link.y1 - half}`;
    const bottom = `L${b},${link.y1 + half}C${middle},${link.y1 + half} ${middle},${link.y0 + half} ${a},${link.y0 + half}Z`;
    draw("path", { d: top + bottom, fill: colour(ENDS[link.target.name] || "dim"), "fill-opacity": 0.35 });
  }
  for (const node of graph.nodes) {
    const fill = colour(ENDS[node.name] || "dim");
    draw("rect", { x: node.x0, y: node.y0, width: node.x1 - node.x0, height: Math.max(1, node.y1 - node.y0), fill });
    if (node.name !== source) {
      const label = `${node.name} ${whole(node.value)} (${percent(node.value / total)})`;
      draw("text", { x: node.x1 + 6, y: (node.y0 + node.y1) / 2 + 4, fill: colour("ink"), "font-size": 12 }, label);
    }
  }
  return el("div", {}, heading, svg);
}

// One line in place of what only a trace knows.
function noTrace(run, what) {
  const how = run.config["tracking.trace"] === "full" ? "the run's folder has no trace of it" : "tracking.trace=full records it";
  return el("p", { class: "hint" }, `${what}: not recorded (${how})`);
}

function waitPanel(run) {
  const causes = [...new Set(run.waits.flatMap((process) => Object.keys(process.causes)))].sort();
  if (!causes.length) return noTrace(run, "Each process's time and work");
  const tint = (cause) => PALETTE[causes.indexOf(cause) % PALETTE.length];
  const legend = el("p", { class: "legend" }, causes.map((cause) => key(`waits for ${cause}`, tint(cause))), key("at work", "busy"));

  const rows = run.waits.map((process) => {
    const segments = Object.entries(process.causes).map(([cause, seconds]) => [tint(cause), seconds, `waits for ${cause}`]);
    const waited = segments.reduce((sum, [, seconds]) => sum + seconds, 0);
    segments.push(["busy", Math.max(0, process.seconds - waited), "at work"]);
    const total = Math.max(process.seconds, waited) || 1;
    const strip = el("div", { class: "strip" });
    for (const [kind, seconds, label] of segments) {
      const part = el("i", { title: `${process.name}: ${label} ${clock(seconds)} (${percent(seconds / total)})` });
      part.style.flexGrow = seconds / total;
      part.style.background = `var(--${kind})`;
      strip.append(part);
    }
    return el("div", { class: "waits" }, el("span", {}, process.name), strip);
  });
  const { name, longest: [seconds, whom, step] } = run.waits.reduce((most, each) => (each.longest[0] > most.longest[0] ? each : most));
  const longest = seconds > 0 ? el("p", {}, `The longest wait: ${name} for ${whom}, ${clock(seconds)} in step ${step}.`) : null;
  return panel("Each process's time, by whom it waits for", legend, longest, rows);
}

// Who is slower than the others.
function workPanel(run) {
  const kinds = new Map();
  (run.timeline.work || []).forEach((parts, i) => {
    for (const [kind, [count, average, longest]] of Object.entries(parts)) {
      if (!kinds.has(kind)) kinds.set(kind, []);
      kinds.get(kind).push({ who: run.timeline.lanes[i].name, count, average, longest });
    }
  });
  if (!kinds.size) return "";

  const rows = [...kinds].map(([kind, workers]) => {
    const ranked = [...workers].sort((one, other) => other.average - one.average);
    const named = ranked.length <= 4 ? workers : [ranked[0], ranked[ranked.length - 1]];
    const slowest = workers.reduce((one, other) => (other.longest > one.longest ? other : one));
    const count = workers.reduce((sum, worker) => sum + worker.count, 0);
    const means = named.map((worker) => `${worker.who} ${clock(worker.average)}`.replaceAll(" ", "\u00a0")).join(ranked.length <= 4 ? ", " : " … ");
    return [KIND_NAMES[kind] || kind, whole(count), means, clock(slowest.longest), slowest.who];
  });
  rows.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0));
  return panel("What each process did", table(["what", "times", "mean (of more than four: the slowest and the fastest)", "longest", "by"], rows));
}

function lossPanels(run) {
  const failures = run.failures.map(([reason, count, tasks]) => [reason, whole(count), tasks.join(", ")]);
  const cut = Object.entries(run.cut).filter(([, of]) => present(of.cut)).map(([what, of]) => [what, short(of.kept), short(of.cut)]);
  return el("div", { class: "grid" },
    failures.length ? panel("Why episodes failed", table(["reason", "attempts", "tasks"], failures)) : null,
    !failures.length && run.failed.episodes ? panel("Episodes that failed", el("p", {}, `${whole(run.failed.episodes)} attempts, ${clock(run.failed.seconds)} on average`), noTrace(run, "Reasons and tasks")) : null,
    cut.length ? panel("Episodes that were kept, against those that were cut", table(["mean", "kept", "cut"], cut)) : null);
}

function originPanels(run) {
  const { recipe, differences, versions, machine, start } = run.origin;
  const text = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const changed = Object.entries(differences).map(([field, [before, now]]) => [field, text(before), text(now)]);
  const of = recipe || "the defaults";
  const facts = Object.entries({ ...versions, ...machine, ...start });
  return el("div", { class: "grid" },
    panel(`Differences to ${of}`, changed.length ? table(["field", "there", "here"], changed) : el("p", { class: "hint" }, "none")),
    panel("Versions and machine", facts.length ? table(["", ""], facts) : el("p", { class: "hint" }, "not recorded")),
  );
}
