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
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; margin-bottom: 8px; }
"""

SCRIPT = """
for (const chart of document.querySelectorAll("svg.chart")) {
  const points = JSON.parse(chart.dataset.points), cross = chart.querySelector(".cross");
  const read = chart.parentElement.querySelector(".read"), rest = read.textContent;
  const width = chart.viewBox.baseVal.width;
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    let best = points[0];
    for (const point of points) if (Math.abs(point[1] - at) < Math.abs(best[1] - at)) best = point;
    cross.setAttribute("x1", best[1]); cross.setAttribute("x2", best[1]);
    cross.style.visibility = "visible";
    read.textContent = `step ${best[0]}: ${best[2]}`;
  });
  chart.addEventListener("pointerleave", () => { cross.style.visibility = "hidden"; read.textContent = rest; });
}
"""
