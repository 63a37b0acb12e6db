"""The page's style and its one script: both inline, so that the page needs nothing else."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --page: #f5f6f8; --card: #ffffff;
  --edge: #d9dee4; --grid: #e8ebef; --line: #2563c9; --good: #1a7f4b; --bad: #c2410c; --unsure: #6b5b00;
  --goodbg: #e3f4ea; --badbg: #fdeade; --unsurebg: #f8f0cc;
  --p0: #2563c9; --p1: #8fb3ea; --p2: #d97706; --p3: #9aa4af; --p4: #0f9488; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #9aa5b1; --page: #12151a;
  --card: #1b2027; --edge: #303842; --grid: #2a313a; --line: #74a7f7; --good: #5fce93; --bad: #fb923c;
  --unsure: #e6cf5c; --goodbg: #12301f; --badbg: #3a2010; --unsurebg: #322c0d;
  --p0: #74a7f7; --p1: #3d65a8; --p2: #f0a545; --p3: #7a8694; --p4: #3fc1b4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 15px; font-weight: 600; margin: 0 0 12px; color: var(--soft); }
h2 { font-size: 17px; margin: 32px 0 10px; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
.verdict { border-radius: 12px; padding: 18px 20px; }
.verdict strong { display: block; font-size: 30px; line-height: 1.15; letter-spacing: -0.01em; }
.verdict p { margin: 6px 0 0; max-width: 75ch; overflow-wrap: anywhere; }
.same { background: var(--goodbg); } .same strong { color: var(--good); }
.different { background: var(--badbg); } .different strong { color: var(--bad); }
.unsure { background: var(--unsurebg); } .unsure strong { color: var(--unsure); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 12px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 14px; }
.tile { display: flex; flex-direction: column; justify-content: space-between; }
.tile span { display: block; color: var(--soft); font-size: 12.5px; }
.tile b { white-space: nowrap; font-size: 19px; font-weight: 650; font-variant-numeric: tabular-nums; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 12px; }
.card { position: relative; min-width: 0; }
.card header { display: flex; justify-content: space-between; gap: 8px; align-items: baseline; }
.card header span { color: var(--soft); font-size: 12.5px; font-variant-numeric: tabular-nums; }
.card .read { min-height: 18px; }
.card p { margin: 0; color: var(--soft); font-size: 12.5px; }
.chart { width: 100%; height: auto; display: block; touch-action: pan-y; }
.grid { stroke: var(--grid); } .tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.line { fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--line); } .bar.good { fill: var(--good); } .bar.bad { fill: var(--bad); }
.cross { stroke: var(--soft); stroke-dasharray: 3 3; visibility: hidden; }
.phase0 { fill: var(--p0); } .phase1 { fill: var(--p1); } .phase2 { fill: var(--p2); }
.phase3 { fill: var(--p3); } .phase4 { fill: var(--p4); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid var(--grid); vertical-align: top;
  white-space: nowrap; }
td.wrap { white-space: normal; min-width: 220px; }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; font-size: 12.5px; }
td.num, th.num { text-align: right; }
.route { font-weight: 650; } .R { color: var(--good); } .P { color: var(--bad); }
code { font: 12.5px ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.series0 { stroke: var(--line); } .series1 { stroke: var(--p2); } .series2 { stroke: var(--p4); }
.series3 { stroke: var(--bad); } .series4 { stroke: var(--p3); } .series5 { stroke: var(--unsure); }
mark { background: var(--badbg); color: var(--bad); }
.topology { width: 100%; max-width: 720px; height: auto; display: block; }
.topology .box { fill: var(--page); stroke: var(--edge); } .topology text { fill: var(--ink); font-size: 12px; }
.topology .side { font-weight: 600; } .topology .in { fill: var(--soft); font-size: 11px; }
.wire { stroke: var(--soft); } .tip { fill: var(--soft); }
:focus-visible { outline: 2px solid var(--line); outline-offset: 2px; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; margin-bottom: 8px; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff; --card: #fff; --edge: #bbb;
    --grid: #ddd; --line: #1d4fa0; --good: #14633b; --bad: #9a3412; --unsure: #5b4d00; --goodbg: #fff; --badbg: #fff;
    --unsurebg: #fff; --p0: #1d4fa0; --p1: #8fb3ea; --p2: #b45309; --p3: #777; --p4: #0b6b62; }
  body { font-size: 11px; } main { max-width: none; padding: 0; } .card, .verdict, tr { break-inside: avoid; }
  .verdict { border: 1px solid var(--edge); } .scroll { overflow: visible; } td { white-space: normal; }
  .cards { grid-template-columns: repeat(2, 1fr); } table { font-size: 10px; } td, th { padding: 3px 6px; } }
"""

SCRIPT = """
for (const chart of document.querySelectorAll("svg.chart")) {
  const points = JSON.parse(chart.dataset.points), cross = chart.querySelector(".cross");
  const read = chart.parentElement.querySelector(".read"), rest = read.textContent;
  const width = chart.viewBox.baseVal.width;
  let chosen = -1;
  const show = (index) => {
    chosen = Math.max(0, Math.min(points.length - 1, index));
    const best = points[chosen];
    cross.setAttribute("x1", best[1]); cross.setAttribute("x2", best[1]);
    cross.style.visibility = "visible";
    read.textContent = `step ${best[0]}: ${best[2]}`;
  };
  const hide = () => { chosen = -1; cross.style.visibility = "hidden"; read.textContent = rest; };
  read.setAttribute("aria-live", "polite");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(point[1] - at) < Math.abs(points[best][1] - at)) best = index; });
    show(best);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: points.length - 1 };
    if (event.key === "Escape") hide();
    else if (event.key in moves) { show(moves[event.key]); event.preventDefault(); }
  });
}
const closed = [];
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) { closed.push(part); part.open = true; }
});
addEventListener("afterprint", () => { while (closed.length) closed.pop().open = false; });
"""
