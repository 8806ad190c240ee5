// Draws what the JSON of the page holds: curves by step, marks, shares of the mixture, flows.
"use strict";
let runs = JSON.parse(document.getElementById("numbers").textContent);
const CHARTS = [
  // title, which metrics, unit, only among all metrics
  ["loss", (n) => n === "loss" || /^eval\/.*\/loss$/.test(n), "nats a token"],
  ["loss by dataset", (n) => /(^|\/)nll\/[^/]*$/.test(n), "nats a token"],
  ["gradient norm", (n) => n === "grad_norm", ""],
  ["learning rate", (n) => n === "learning_rate", ""],
  ["throughput", (n) => n === "tokens_per_second", "tokens a second, without padding"],
  ["MFU", (n) => n === "mfu" || n === "mfu_palm", "share of the peak"],
  ["waiting for data", (n) => n === "data_wait", "share of the time"],
];
const DASHES = ["solid", "dashed", "dotted"];
const STEPS = {
  axisLabel: { hideOverlap: true, formatter: (step) => (Number.isInteger(step) ? step.toLocaleString("en") : "") },
  axisPointer: { label: { formatter: ({ value }) => `step ${value.toLocaleString("en")}` } },
};
const charts = new Map();
const DRAGS = !matchMedia("(pointer: coarse)").matches; // a finger scrolls the page
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const byId = (id) => document.getElementById(id);

function smoothed(values, weight) {
  // an exponential mean that begins without a bias towards 0
  let mean = 0, mass = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function marks(run) {
  const lines = run.marks.map((mark) => ({ xAxis: mark.step }));
  return { symbol: "none", silent: true, label: { show: false }, lineStyle: { type: "dashed", color: "#c55", opacity: 0.5 }, data: lines };
}

function curve(run, name, label, color, dash) {
  const [steps, values] = run.curves[name];
  const weight = name.startsWith("eval/") ? 0 : Number(byId("smoothing").value);
  const drawn = weight ? smoothed(values, weight) : values;
  return {
    type: "line", id: `${runs.indexOf(run)} ${name}`, name: label, symbol: values.length < 60 ? "circle" : "none", symbolSize: 4,
    lineStyle: { width: 1.3, type: dash }, color, animation: false,
    data: steps.map((step, i) => [step, drawn[i]]),
  };
}

function clicked(chart, { offsetX, offsetY }) {
  // shows the marks beside the pointer, and the nearest point with the command that explains its batch
  if (!chart.containPixel("grid", [offsetX, offsetY])) return;
  const beside = (mark) => Math.abs(chart.convertToPixel({ xAxisIndex: 0 }, mark.step) - offsetX) < 5;
  const found = runs.flatMap((run) => run.marks).filter(beside).map((mark) => `${mark.kind} at step ${mark.step}: ${mark.text}`);
  let nearest = 20, point = "";
  for (const { id, name, data } of chart.getOption().series) for (const [step, value] of data) {
    const [x, y] = chart.convertToPixel({ gridIndex: 0 }, [step, value]);
    const away = Math.hypot(x - offsetX, y - offsetY);
    if (!(away < nearest)) continue; // NaN, of a value that a logarithmic axis does not show
    nearest = away;
    point = `step ${step}: ${name} ${Number(value).toPrecision(5)}; its documents: easypipe explain ${runs[parseInt(id)].config} --step ${step - 1}`;
  }
  const told = [...found, point].filter(Boolean).join(" · ");
  if (told) byId("mark").textContent = told;
}

function figure(into, title, className) {
  const outer = document.createElement("figure");
  const inner = document.createElement("div");
  inner.className = className;
  inner.dataset.title = title;
  outer.append(inner);
  into.append(outer);
  const chart = echarts.init(inner, dark ? "dark" : null, { renderer: "canvas" });
  charts.set(title, chart);
  // the first call tells the size that it has
  new ResizeObserver(() => { if (chart.getWidth() !== inner.clientWidth) chart.resize(); }).observe(inner);
  return chart;
}

function draw(title, series, unit) {
  if (!series.length) return;
  const chart = charts.get(title) || figure(byId("curves"), title, "plot");
  chart.setOption({
    backgroundColor: "transparent",
    title: { text: title, subtext: unit, left: 8, textStyle: { fontSize: 13 }, subtextStyle: { fontSize: 11 } },
    legend: { show: series.length > 1, bottom: 0, type: "scroll" },
    grid: { left: 60, right: 16, top: 52, bottom: series.length > 1 ? 52 : 28 },
    tooltip: { trigger: "axis", renderMode: "richText", valueFormatter: (v) => (v == null ? "" : Number(v).toPrecision(5)) },
    toolbox: { right: 4, top: 0, itemSize: 11, feature: { dataZoom: { yAxisIndex: "none" }, restore: {}, saveAsImage: {} } },
    xAxis: { type: "value", min: "dataMin", max: "dataMax", splitLine: { show: false }, ...STEPS },
    yAxis: byId("logarithmic").checked ? { type: "log", min: "dataMin", max: "dataMax", axisLabel: { formatter: (v) => String(Number(v.toPrecision(3))) } } : { type: "value", scale: true },
    dataZoom: DRAGS ? [{ type: "inside", zoomOnMouseWheel: "ctrl" }] : [],
    series,
  }, { replaceMerge: ["series"], lazyUpdate: DRAGS }); // the action below draws it
  if (DRAGS) chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
  chart.getZr().off("click");
  chart.getZr().on("click", (event) => clicked(chart, event));
  chart.getZr().off("dblclick");
  chart.getZr().on("dblclick", () => chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
}

function drawAll() {
  const palette = ["#5470c6", "#ee6666", "#3ba272", "#fac858", "#9a60b4", "#fc8452", "#73c0de", "#ea7ccc"];
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves)));
  const known = (name) => CHARTS.some(([, picks]) => picks(name));
  const rest = [...names].filter((name) => !known(name)).map((name) => [name, (n) => n === name, ""]);
  for (const [title, picks, unit] of [...CHARTS, ...(byId("more").checked ? rest : [])]) {
    const series = [];
    runs.forEach((run, r) => Object.keys(run.curves).filter(picks).sort((a, b) => a.includes("/") - b.includes("/")).forEach((name, n) => {
      const label = runs.length > 1 ? `${run.name}: ${name}` : name;
      series.push({ markLine: n ? undefined : marks(run), ...curve(run, name, label, palette[(runs.length > 1 ? r : n) % palette.length], DASHES[(runs.length > 1 ? n : 0) % 3]) });
    }));
    draw(title, series, unit);
  }
  for (const [title] of rest) if (charts.has(title)) charts.get(title).getDom().parentElement.hidden = !byId("more").checked;
  for (const run of runs) {
    const shares = Object.entries(run.mixture).flatMap(([name, part], n) => [["so far", "solid", 1.8, 1], ["lately", "solid", 0.8, 0.5], ["asked for", "dashed", 1, 1]].map(
      ([key, type, width, opacity]) => ({
        type: "line", id: `${runs.indexOf(run)} ${name} ${key}`, name: `${name}, ${key}`, symbol: part.step.length < 2 ? "circle" : "none", animation: false, color: palette[n % palette.length],
        step: key === "asked for" ? "end" : false, lineStyle: { type, width, opacity }, data: part.step.map((step, i) => [step, part[key][i]]),
      })));
    if (shares.length) shares[0].markLine = marks(run);
    draw(runs.length > 1 ? `mixture of ${run.name}` : "mixture", shares, "share of the tokens");
    if (!run.flows.length) continue;
    const title = runs.length > 1 ? `where the tokens of ${run.name} went` : "where the tokens went";
    const chart = charts.get(title) || figure(byId("flows"), title, "flow");
    const narrow = chart.getWidth() < 600; // of a phone: then from top to bottom
    const layout = narrow ? { orient: "vertical", left: 12, right: 130, label: { position: "insideLeft" } } : { right: 140 };
    const nodes = [...new Set(run.flows.flatMap((link) => [link.source, link.target]))].map((name) => ({ name }));
    chart.setOption({
      backgroundColor: "transparent",
      title: { text: title, left: 8, textStyle: { fontSize: 13 } },
      tooltip: { renderMode: "richText", valueFormatter: (v) => `${Number(v).toLocaleString("en")} tokens` },
      series: [{ type: "sankey", top: 40, ...layout, data: nodes, links: run.flows, emphasis: { focus: "adjacency" }, animation: false, labelLayout: { hideOverlap: true }, lineStyle: { color: "gradient" } }],
    });
  }
  echarts.connect([...charts.values()].filter((chart) => chart.getOption().xAxis));
}

for (const id of ["smoothing", "logarithmic", "more"]) byId(id).addEventListener("input", drawAll);
if (!DRAGS) byId("zooming").remove();
drawAll();
async function refresh() {
  try {
    const answer = await fetch("news.json");
    if (answer.ok) {
      const { numbers, tables } = await answer.json();
      const open = [...document.querySelectorAll("details")].map((part) => part.open);
      runs = numbers;
      drawAll();
      byId("tables").innerHTML = tables;
      document.querySelectorAll("details").forEach((part, i) => { part.open = open[i]; });
    }
  } catch { /* the server is gone for now: the page keeps what it has */ }
  setTimeout(refresh, REFRESH * 1000);
}
if (REFRESH) setTimeout(refresh, REFRESH * 1000);
