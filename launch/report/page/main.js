// The frame: views by number keys, light and dark, which run is shown.
const TITLES = { overview: "Overview", timeline: "Timeline", samples: "Samples", steps: "Steps", compare: "Compare", lab: "Lab" };
const main = document.querySelector("main");

async function show(name) {
  forgetCharts();
  report.view = name;
  for (const tab of document.querySelectorAll("nav button")) tab.setAttribute("aria-selected", tab.dataset.view === name);
  const page = el("div");
  main.replaceChildren(page);
  main.dataset.view = "";
  await views[name](page, report.runs[report.chosen]);
  main.dataset.view = name;
}

function shade(theme) {
  document.documentElement.dataset.theme = theme;
  if (report.view) show(report.view);
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const name = Object.keys(TITLES)[Number(event.key) - 1];
  if (name) show(name);
  else if (views[report.view].key) views[report.view].key(event);
  else if (views[report.view].step && event.key === "ArrowLeft") views[report.view].step(-1);
  else if (views[report.view].step && event.key === "ArrowRight") views[report.view].step(1);
  else return;
  if (event.key.startsWith("Arrow")) event.preventDefault();
}

async function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => shade(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => shade(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

  report.runs = await readFacts();
  if (!report.runs.some((run) => run.lab)) delete TITLES.lab;
  const tabs = Object.entries(TITLES).map(([name, title], i) =>
    el("button", { type: "button", role: "tab", title: `key ${i + 1}`, "data-view": name, click: () => show(name) }, title));
  document.querySelector("nav").append(...tabs);

  const list = document.getElementById("run");
  list.append(...report.runs.map((run, i) => el("option", { value: i }, `${run.name} (${run.state})`)));
  list.addEventListener("change", () => {
    report.chosen = Number(list.value);
    lookup.chosen = null;
    show(report.view);
  });

  document.addEventListener("keydown", keys);
  await show(report.runs.length > 1 ? "compare" : "overview");
  const live = document.querySelector("meta[name=live]");
  if (live) follow(live);
}

begin();
