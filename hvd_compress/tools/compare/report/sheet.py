"""The style sheet of the page: for wide screens and narrow ones, light, dark and on paper."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f8; --card: #ffffff; --ink: #1d2126; --soft: #565d66; --line: #dfe2e6; --code: #eef0f2;
  --good: #005a8e; --good-ground: #dcedf8; --bad: #9c3d00; --bad-ground: #fbe7da;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --card: #1d2126; --ink: #e8eaed; --soft: #a9b0b8; --line: #363c43; --code: #2a2f35;
    --good: #8cc8f0; --good-ground: #10354c; --bad: #ffb48a; --bad-ground: #4a2410;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
p, ul { margin: 0 0 .75rem; }
ul { padding-left: 1.2rem; }
li { margin-bottom: .3rem; overflow-wrap: anywhere; }
.soft, figcaption, .under { color: var(--soft); }
.soft { overflow-wrap: anywhere; }
.prose { max-width: 50rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.verdict { padding: 1.1rem 1.25rem .5rem; border-left: 5px solid var(--good); margin-top: 1.25rem; }
.verdict.no { border-left-color: var(--soft); }
.lead { font-size: 1.2rem; line-height: 1.4; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-bottom: .75rem; }
code, pre { font: .88em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--code); border-radius: 4px; padding: .08em .3em; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 8px; padding: .8rem 1rem; margin: 0 0 .75rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .55rem; text-align: right; vertical-align: top; border-top: 1px solid var(--line); }
td { white-space: nowrap; }
thead th { border-top: 0; vertical-align: bottom; font-weight: 600; line-height: 1.25; color: var(--soft); }
th:first-child { position: sticky; left: 0; background: var(--card); text-align: left; overflow-wrap: anywhere; }
tbody th { font-weight: 400; min-width: 9.5rem; max-width: 15rem; }
.words td, .methods td:nth-child(2), .methods th:nth-child(2), td:last-child.text { text-align: left; }
.words td, .methods td:nth-child(2) { white-space: normal; overflow-wrap: anywhere; }
.methods td:nth-child(2) { min-width: 8.5rem; }
.under { display: block; font-size: .8rem; }
.mark { display: inline-block; border-radius: 4px; padding: .05em .5em; margin-left: -.5em; }
.mark.good { background: var(--good-ground); color: var(--good); font-weight: 600; margin-left: 0; }
.mark.bad { background: var(--bad-ground); color: var(--bad); margin-left: 0; }
figure { margin: 0 0 1.5rem; }
figure .scroll { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
figure img { display: block; width: 100%; min-width: 640px; height: auto; }
figcaption { font-size: .9rem; margin-top: .5rem; max-width: 50rem; }
@media print {
  :root {
    color-scheme: light;
    --ground: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --code: #eee;
    --good: #005a8e; --good-ground: #dcedf8; --bad: #9c3d00; --bad-ground: #fbe7da;
  }
  @page { size: A4 landscape; margin: 14mm; }
  body { font-size: 10pt; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  figure, tr, .verdict { break-inside: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  .under { font-size: 6.5pt; }
  th, td { padding: .2rem .3rem; }
  th:first-child { position: static; }
  tbody th { min-width: 28mm; }
  .methods td:nth-child(2) { min-width: 18mm; }
  figure img { min-width: 0; max-height: 165mm; width: auto; max-width: 100%; }
}
"""
