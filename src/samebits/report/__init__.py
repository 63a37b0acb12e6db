"""Records to one HTML page that needs no network. It never runs anything, and loads no torch."""

from samebits.report.page import write_report as write_report
