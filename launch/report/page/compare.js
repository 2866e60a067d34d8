// Runs side by side. Runs that differ in nothing but seed and name are seeds of one set.
const comparison = { x: "seconds", metric: "rollout/reward" };
const NOT_COMPARED = new Set(["name", "runs", "seed", "resume"]);
const T95 = [12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]; // two-sided 95 % of Student's t, by degrees of freedom

views.compare = (main) => {
  const sets = setsOf(report.runs);
  const fields = differing(report.runs);
  if (report.runs.length < 2) {
    main.append(el("p", { class: "hint" }, "One run is in this report. Several are compared: fresco report RUN RUN …"));
  }
  const text = (value) => (value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = fields.map((field) => [field, ...sets.map((set) => text(set.runs[0].config[field]))]);
  const head = ["field", ...sets.map((set) => `${set.name} (${countOf(set.runs)})`)];
  main.append(panel("Differences of configuration", rows.length ? table(head, rows) : el("p", { class: "hint" }, "none but seed and name"), markedRuns(sets)), outcomes(sets));

  const place = el("div", { class: "chart" });
  const draw = () => {
    place.replaceChildren();
    compareCurves(place, sets);
  };
  const pick = (name) => (value) => {
    comparison[name] = value;
    draw();
  };
  const metrics = [...new Set(report.runs.flatMap((run) => [...Object.keys(run.rows).filter((name) => name !== "time"), "held-out accuracy"]))].sort();
  main.append(panel("Curves: each run, and while all of a set go on their mean and the band from lowest to highest",
    el("div", { class: "controls" }, choice("", metrics.map((name) => [name, name]), comparison.metric, pick("metric")),
      choice("over", ["seconds", "samples", "steps"].map((name) => [name, name]), comparison.x, pick("x")), smoothingChoice()), place));
  draw();
};

function differing(runs) {
  const fields = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  return fields.filter((field) => !NOT_COMPARED.has(field) && new Set(runs.map((run) => JSON.stringify(run.config[field]))).size > 1);
}

function setsOf(runs) {
  const fields = differing(runs);
  const sets = new Map();
  for (const run of runs) {
    const key = JSON.stringify(fields.map((field) => run.config[field]));
    const named = fields.map((field) => `${field.slice(field.lastIndexOf(".") + 1)}=${run.config[field]}`).join(" ");
    const name = 0 < fields.length && fields.length <= 2 ? named : run.name;
    if (!sets.has(key)) sets.set(key, { name, runs: [], colour: PALETTE[sets.size % PALETTE.length] });
    sets.get(key).runs.push(run);
  }
  return [...sets.values()];
}

const stepsOf = (run) => (run.rows.step || []).length;
const isWhole = (run) => run.state === "finished";

function countOf(runs) {
  const seeds = new Set(runs.map((run) => run.config.seed)).size;
  if (runs.length === 1) return "1 run";
  const named = `${seeds} ${seeds === 1 ? "seed" : "seeds"}`;
  return seeds === runs.length ? named : `${runs.length} runs of ${named}`;
}

// The runs of a set whose outcomes can stand together: the finished ones, if there are any.
function counted(set) {
  const whole = set.runs.filter(isWhole);
  return whole.length ? whole : set.runs;
}

// What makes runs no equals: one that did not finish, and finished ones of unequal length.
function markedRuns(sets) {
  const marks = sets.flatMap((set) => {
    const taken = counted(set);
    const lengths = [...new Set(taken.map(stepsOf))].sort((a, b) => a - b);
    const unequal = lengths.length > 1 ? [`${set.name}: its runs are of unequal length, ${lengths.join(", ")} steps`] : [];
    const unfinished = set.runs.filter((run) => !isWhole(run)).map((run) =>
      `${run.name}: unfinished (${run.state} at step ${stepsOf(run)} of ${run.config.steps})${taken.includes(run) ? "" : ", not in the outcomes"}`);
    return [...unequal, ...unfinished];
  });
  return marks.length ? el("ul", {}, marks.map((text) => el("li", { class: "mark" }, text))) : "";
}

// A value for each seed: runs of one seed are no independent trials, and count as their mean.
function bySeed(runs, value) {
  const seeds = new Map();
  for (const run of runs) {
    const found = value(run);
    if (present(found)) seeds.set(run.config.seed, [...(seeds.get(run.config.seed) || []), found]);
  }
  return [...seeds.values()].map(mean);
}

function outcomes(sets) {
  const last = (values) => mean(values.filter(present).slice(-10));
  const of = {
    "steps trained": stepsOf,
    "held-out accuracy, last": (run) => (run.evaluations.length ? run.evaluations[run.evaluations.length - 1].accuracy : NaN),
    "reward, last 10 batches": (run) => last(run.rows["rollout/reward"] || []),
    "tokens per second, last 10": (run) => last(run.rows.tokens_per_second || []),
    seconds: (run) => run.seconds,
  };
  const cell = (known) => {
    if (!known.length) return "–";
    if (known.length === 1) return short(known[0]);
    const centre = mean(known);
    const spread = Math.sqrt(known.reduce((sum, v) => sum + (v - centre) ** 2, 0) / (known.length - 1));
    const half = ((T95[known.length - 2] || 2) * spread) / Math.sqrt(known.length);
    return `${short(centre)} ± ${short(half)}`;
  };
  const rows = Object.entries(of).map(([name, value]) => [name, ...sets.map((set) => cell(bySeed(counted(set), value)))]);
  const head = ["", ...sets.map((set) => `${set.name} (${countOf(counted(set))})`)];
  return panel("Outcomes (mean ± half of the 95 % interval over seeds, Student's t)", table(head, rows));
}

function lineOf(run) {
  if (comparison.metric === "held-out accuracy") {
    const steps = run.evaluations.map((row) => row.step);
    return { steps, seconds: run.evaluations.map((row) => row.seconds), y: run.evaluations.map((row) => row.accuracy), run };
  }
  return { steps: run.rows.step || [], seconds: run.rows.seconds || [], y: run.rows[comparison.metric] || [], run };
}

function compareCurves(place, sets) {
  const lines = [];
  for (const set of sets) {
    const members = set.runs.map(lineOf).filter((line) => line.y.some(present));
    const along = members.map((line) => ({
      x: { seconds: line.seconds, steps: line.steps, samples: line.steps.map((step) => (step - line.run.startStep) * line.run.batch) }[comparison.x],
      y: line.y,
    }));
    if (!along.length) continue;

    const x = [...new Set(along.flatMap((line) => line.x))].sort((a, b) => a - b);
    const values = along.map((line) => interpolated(line, x));
    const known = x.map((_, i) => values.map((column) => column[i]).filter(present));
    const whole = known.map((column) => (column.length === along.length ? column : []));
    const by = (how) => whole.map((column) => (column.length ? how(column) : null));
    const band = along.length > 1 ? { low: by((v) => Math.min(...v)), high: by((v) => Math.max(...v)) } : {};
    lines.push({ label: set.name, x, y: by(mean), colour: set.colour, ...band });
    if (along.length > 1) along.forEach(({ x: own, y }) => lines.push({ label: "", x: own, y, colour: set.colour, width: 0.6, silent: true }));
  }
  curves(place, lines, { x: comparison.x, height: 320 });
}

// The line's value at each x between its ends; null beyond them.
function interpolated(line, xs) {
  const points = line.x.map((x, i) => [x, line.y[i]]).filter(([, y]) => present(y));
  let right = 0;
  return xs.map((x) => {
    while (right < points.length && points[right][0] < x) right++;
    if (right === points.length || (right === 0 && points[0][0] > x)) return null;
    if (points[right][0] === x) return points[right][1];
    const [[x0, y0], [x1, y1]] = [points[right - 1], points[right]];
    return y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
  });
}
