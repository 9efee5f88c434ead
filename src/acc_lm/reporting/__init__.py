"""Terminal, trackers, speed, profile and reports of a run.

console          start block, progress bar, closing block
rows             rows as text, in a terminal or as HTML
run_record       facts of a run, read from its folder
run_comparison   first step at which two runs part, and why
report_parts     parts of a report: paragraphs, tables, bars, figures
report_sections  content of a report about one run
report_proof     ledger, resumes, and checks computed from the files
report_html      report -> one page
html_page        frame of a page: style, policy, escaped text
report_markdown  report -> Markdown
chart_svg        chart -> inline SVG
tracking         Accelerate's trackers, from a thread: every step exactly once, in order
trackers         where each tracker writes, and how it stays one run over all starts
speed            tokens and FLOP per second, and where the time of a step goes
profiler         traces of a few steps
trace            trace -> table of where the time of a step goes
"""
