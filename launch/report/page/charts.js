// Curves and histograms by uPlot (github.com/leeoniya/uPlot, MIT).
const PALETTE = Array.from({ length: 16 }, (_, i) => `c${i + 1}`);
const smoothing = { steps: 1 };
const charts = new Set();
const WHOLE = Array.from({ length: 27 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)); // there is no step 2.5
const ROOM = 10; // between the numbers of an axis and its line, in pixels

function tick(value) {
  if (!present(value)) return "";
  const small = value !== 0 && Math.abs(value) < 1e-3;
  return small ? Number(value.toPrecision(3)).toExponential() : value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

// As wide as the longest of its numbers.
function widthOf(chart, values, place, cycle) {
  if (cycle > 1) return chart.axes[place]._size; // uPlot asks again while widths and numbers change one another
  chart.ctx.save();
  chart.ctx.font = "12px sans-serif";
  const longest = Math.max(20, ...(values || []).map((text) => chart.ctx.measureText(text).width));
  chart.ctx.restore();
  return Math.ceil(longest) + ROOM + 10;
}

// A line that never moves gets a window of its own: uPlot's would reach from 0 to 100, which are 10,000 %.
const windowOf = (percentages) => (_, low, high) => {
  const flat = low === high && (low === 0 || (percentages && 0 < low && low <= 1));
  return flat || !present(low) ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
};

// An upright line at each step in which an alarm was raised.
function markAlarms(chart) {
  const { left, top, width, height } = chart.bbox;
  for (const { step } of report.runs[report.chosen].alarms) {
    const x = chart.valToPos(step, "x", true);
    if (x < left || x > left + width) continue;
    chart.ctx.fillStyle = colour("warn");
    chart.ctx.fillRect(Math.round(x) - 1, top, 2, height);
  }
}

const alarmKey = (run) => (run.alarms.length ? el("p", { class: "legend" }, key("upright lines: alarms", "warn", "upright")) : "");

function smoothingChoice() {
  const options = [["1", "each step"], ["5", "mean of 5 steps"], ["20", "mean of 20 steps"], ["100", "mean of 100 steps"]];
  return choice("curves:", options, String(smoothing.steps), (value) => {
    smoothing.steps = Number(value);
    show(report.view);
  });
}

// The mean of each value and those before it, `smoothing.steps` in all; fewer where the line begins.
function smoothed(values) {
  const window = [];
  let sum = 0;
  return values.map((value) => {
    if (!present(value)) return value;
    window.push(value);
    sum += value;
    if (window.length > smoothing.steps) sum -= window.shift();
    return sum / window.length;
  });
}

const watcher = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    const width = Math.floor(entry.contentRect.width);
    if (chart && width > 0 && width !== chart.width) chart.setSize({ width, height: chart.height });
  }
});

function forgetCharts() {
  for (const chart of charts) {
    watcher.unobserve(chart.root.parentNode);
    chart.destroy();
  }
  charts.clear();
}

function axis(label, more = {}) {
  const grid = { stroke: colour("grid"), width: 1 };
  return { stroke: colour("dim"), grid, ticks: grid, label, labelSize: label ? 18 : 0, labelGap: 0, font: "12px sans-serif", labelFont: "12px sans-serif", ...more };
}

// A chart that fills `parent`, which must be in the page.
function mount(parent, options, data) {
  const width = Math.max(200, Math.floor(parent.clientWidth));
  const chart = new uPlot({ width, height: 220, ...options }, data, parent);
  parent.chart = chart;
  charts.add(chart);
  watcher.observe(parent);
  return chart;
}

// lines: [{label, x, y, low, high, colour, dash, width, silent}]; x may differ between them. Empty ones are left out, silent
// ones have no legend.
function curves(parent, lines, { x = "step", y = "", height = 220, percentages = false, smooth = true } = {}) {
  const known = lines.filter((line) => line.y && line.y.some(present));
  const still = known.filter((line) => !line.silent && line.y.every((value) => !value));
  const moving = known.filter((line) => !still.includes(line));
  const drawn = (moving.length ? moving : known).flatMap((line) => (smooth && smoothing.steps > 1 && !line.silent
    ? [{ ...line, silent: true, width: 0.6 }, { ...line, y: smoothed(line.y), low: undefined }] : [line]));
  if (!drawn.length) {
    parent.append(el("p", { class: "hint" }, "nothing was recorded"));
    return;
  }

  if (moving.length && still.length) parent.append(el("p", { class: "hint" }, `0 at every ${x}: ${still.map((line) => line.label).join(", ")}`));
  const shades = new Map(); // by label: what is smoothed has the colour of what it was
  const tables = [];
  const series = [{ label: x, value: (_, v) => (present(v) ? short(v) : "") }];
  const bands = [];
  for (const line of drawn) {
    if (!shades.has(line.label)) shades.set(line.label, shades.size);
    const place = shades.get(line.label);
    const stroke = colour(line.colour || PALETTE[place % PALETTE.length]);
    const value = (_, v) => (present(v) ? (percentages ? percent(v) : short(v)) : "");
    const columns = [line.x, line.y.map((v) => (present(v) ? v : null))];
    const count = line.y.filter(present).length;
    const dots = count === 1 || (count < 30 && !line.low && !line.silent);
    const dash = line.dash || (place >= PALETTE.length ? [6, 3] : undefined);
    series.push({ label: line.label, stroke, width: line.width || 2, dash, spanGaps: true, value, points: { show: dots, size: count === 1 ? 9 : undefined }, class: line.silent ? "bound" : undefined });

    if (line.low) {
      columns.push(line.high, line.low);
      series.push({ label: `${line.label} high`, width: 0, spanGaps: true, points: { show: false }, class: "bound", value });
      series.push({ label: `${line.label} low`, width: 0, spanGaps: true, points: { show: false }, class: "bound", value });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `color-mix(in srgb, ${stroke} 20%, transparent)` });
    }
    tables.push(columns);
  }

  const places = new Set(drawn.flatMap((line) => line.x));
  const [first] = places;
  const format = percentages ? (_, values) => values.map((v) => `${tick(100 * v)} %`) : (_, values) => values.map(tick);
  const options = {
    height,
    series,
    bands,
    scales: { x: { time: false, ...(places.size === 1 ? { range: [first - 1, first + 1] } : {}) }, y: { range: windowOf(percentages) } },
    axes: [axis(x, { size: 30, ...(x === "step" ? { incrs: WHOLE } : {}) }), axis(y, { size: widthOf, values: format })],
    hooks: { draw: x === "step" ? [markAlarms] : [] },
    cursor: { drag: { x: true, y: false } },
    legend: { markers: { dash: (chart, index) => (chart.series[index].dash ? "dashed" : "solid") } },
  };
  return mount(parent, options, uPlot.join(tables));
}

function bars(parent, edges, counts, { x = "", height = 180, categories = null } = {}) {
  const centres = counts.map((_, i) => (categories ? i : (edges[i] + edges[i + 1]) / 2));
  const half = 0.5 * (centres[1] - centres[0] || 1);
  const fill = colour("c1");
  const options = {
    height,
    legend: { show: false },
    scales: {
      x: { time: false, range: [centres[0] - half, centres[centres.length - 1] + half] },
      y: { range: (_, low, high) => [0, 1.08 * (high || 1)] },
    },
    series: [{}, { stroke: fill, fill: `color-mix(in srgb, ${fill} 50%, transparent)`, paths: uPlot.paths.bars({ size: [0.9, 80] }), points: { show: false } }],
    axes: [
      axis(x, { size: 30, ...(categories ? { splits: () => centres, values: () => categories } : { values: (_, values) => values.map(tick) }) }),
      axis("", { size: widthOf, values: (_, values) => values.map(tick) }),
    ],
  };
  return mount(parent, options, [centres, counts]);
}
