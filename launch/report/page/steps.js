// What the loss saw: by token age, as spreads, and as histograms of one step.
const chosenMetrics = { age: "kl_behavior" };

views.steps = (main, run) => {
  const rows = run.rows;
  if (!rows.step || !rows.step.length) {
    main.append(el("p", { class: "hint" }, "no batch was trained"));
    return;
  }
  main.append(histogramPanel(run), el("div", { class: "controls" }, smoothingChoice()), alarmKey(run));

  const drawing = []; // once all cards stand there: how wide each is depends on those beside it
  const chart = (title, lines, options) => {
    const place = el("div", { class: "chart" });
    grid.append(panel(title, place));
    drawing.push(() => curves(place, lines.map((line) => ({ x: rows.step, ...line })), options));
  };
  const line = (label, name, more = {}) => ({ label, y: rows[name], ...more });
  const grid = el("div", { class: "grid" });
  main.append(grid);

  const unsolved = rows["groups/unsolved"];
  const solved = rows["groups/solved"];
  const mixed = solved && solved.map((share, i) => 1 - share - unsolved[i]);
  chart("Share of groups by their members' success", [{ label: "all solved", y: solved, colour: "good" }, { label: "some", y: mixed, colour: "c1" }, { label: "none", y: unsolved, colour: "bad" }], { percentages: true });
  chart("Ratio to the policy that sampled (1 … 99 %)", [
    { label: "median", y: rows["loss/ratio_p50"], low: rows["loss/ratio_p01"], high: rows["loss/ratio_p99"] },
    line("5 %", "loss/ratio_p05", { width: 1, dash: [4, 4], colour: "c1" }), line("95 %", "loss/ratio_p95", { width: 1, dash: [4, 4], colour: "c1" }),
  ]);
  drawing.push(agePanel(grid, rows));
  chart("Entropy of the policy (nats)", [line("entropy", "loss/entropy")]);
  chart("KL to the policies that sampled (nats)", [line("k3", "loss/kl_behavior")]);
  chart("Effective sample size (share of tokens)", [line("ess", "loss/ess")], { percentages: true });
  const bounded = starting(rows, "loss/").filter(({ label }) => label.endsWith("_fraction"));
  chart("Tokens that a bound of the loss stopped", bounded, { percentages: true });
  chart("Gradient norm before clipping", [line("norm", "train/grad_norm")]);
  chart("Success by type of task", starting(rows, "env/success_"), { percentages: true });
  chart("What else the environments counted", starting(rows, "env/").filter(({ label }) => !label.startsWith("success_")));
  chart("Episodes that a limit of length or turns cut", [line("cut", "rollout/truncated")], { percentages: true });
  chart("Length (tokens)", [line("mean", "rollout/length")]);
  chart("Seconds of a step", [line("step", "time/step"), line("training", "time/train"), line("waiting for the batch", "time/wait_batch"), line("publishing", "time/publish")]);
  for (const draw of drawing) draw();
};

const starting = (rows, prefix) =>
  Object.keys(rows).filter((name) => name.startsWith(prefix)).map((name) => ({ label: name.slice(prefix.length), y: rows[name] }));

// One line for each age of tokens: the columns `stale_<age>/<metric>`.
function agePanel(grid, rows) {
  const aged = Object.keys(rows).filter((name) => name.startsWith("stale_"));
  const metrics = [...new Set(aged.map((name) => name.slice(name.indexOf("/") + 1)))].sort();
  const place = el("div", { class: "chart" });
  const draw = (metric) => {
    chosenMetrics.age = metric;
    place.replaceChildren();
    const names = aged.filter((name) => name.endsWith(`/${metric}`)).sort();
    curves(place, names.map((name) => ({ label: `age ${name.slice(6, name.indexOf("/")).replace("_", "–")}`, x: rows.step, y: rows[name] })), { height: 240 });
  };
  const shown = metrics.includes(chosenMetrics.age) ? chosenMetrics.age : metrics[0];
  const pick = metrics.length ? choice("", metrics.map((name) => [name, name]), shown, draw) : null;
  grid.append(panel("Loss diagnostics by token age (versions)", el("div", { class: "controls" }, pick), place));
  return () => draw(shown);
}

function histogramPanel(run) {
  const { steps, ...histograms } = run.histograms;
  const names = Object.keys(histograms);
  if (!names.length) return el("p", { class: "hint" }, "this run recorded no histograms");

  const titles = { length: "generated tokens of a sample", reward: "reward of a sample", ratio: "ratio of a token (its percentiles)" };
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "step" });
  const label = el("b");
  const grid = el("div", { class: "grid" });
  const drawn = [];
  const places = new Map(names.map((name) => [name, el("div", { class: "chart" })]));
  for (const [name, place] of places) grid.append(el("div", {}, el("h3", {}, titles[name] || name), place));

  const draw = () => {
    label.textContent = `step ${steps[slider.value]}`;
    for (const [name, place, chart] of drawn) {
      const { counts } = histograms[name];
      const centres = place.centres;
      chart.setData([centres, counts[slider.value]]);
    }
  };
  slider.addEventListener("input", draw);
  views.steps.step = (by) => {
    slider.value = Number(slider.value) + by;
    draw();
  };

  const found = panel("Histograms of one step", el("div", { class: "controls" }, label, slider), grid);
  requestAnimationFrame(() => {
    if (!found.isConnected) return;
    for (const name of names) {
      const { edges, counts } = histograms[name];
      const place = places.get(name);
      const chart = bars(place, edges, counts[slider.value]);
      place.centres = chart.data[0];
      drawn.push([name, place, chart]);
    }
    draw();
  });
  return found;
}
