//! The table of all metrics: a column for each run, with the best value of each row marked.

use super::RunView;
use super::text::{self, html};
use roommate_core::journal::metrics::{Better, Row};
use std::fmt::Write as _;

/// Which values of a row to mark: the best ones, unless all are equal or no direction is better.
pub(super) fn best(values: &[Option<f64>], better: Better) -> Vec<bool> {
    let known = || values.iter().flatten().copied();
    let low = known().fold(f64::INFINITY, f64::min);
    let high = known().fold(f64::NEG_INFINITY, f64::max);
    let target = match better {
        Better::Lower => low,
        Better::Higher => high,
        Better::Neither => return vec![false; values.len()],
    };
    values.iter().map(|v| low < high && *v == Some(target)).collect()
}

/// Seconds in a unit of time; `None` for other units.
fn seconds_in(unit: &str) -> Option<f64> {
    match unit {
        "us" | "µs" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        "h" => Some(3_600.0),
        _ => None,
    }
}

/// A value as shown, with `extra` (0 to 2) steps of more digits, and in full for the tooltip.
pub(super) fn metric_text(value: f64, unit: &str, extra: usize) -> (String, String) {
    let full = format!("{} {unit}", text::exact(value)).trim_end().to_owned();
    if let Some(scale) = seconds_in(unit) {
        return (text::duration_in(value * scale, 2 + extra), full);
    }
    let plain = match extra {
        0 => text::number(value),
        1 => text::exact((value * 1e4).round() / 1e4),
        _ => text::exact(value),
    };
    let decimals = 1 + 2 * extra;
    match unit {
        "%" => (format!("{value:.decimals$} %"), full),
        "share" => (format!("{:.decimals$} %", value * 100.0), text::exact(value)),
        "x" | "×" => (format!("{plain} ×"), full),
        _ => (plain, full),
    }
}

/// Fewest steps of extra digits with which no other value is shown like the best one, so that the
/// digits explain the star.
pub(super) fn extra_digits(values: &[Option<f64>], marks: &[bool], unit: &str) -> usize {
    let shown = |wanted: bool, extra: usize| {
        let pairs = values.iter().zip(marks).filter(move |&(_, &mark)| mark == wanted);
        pairs.filter_map(move |(value, _)| value.map(|v| metric_text(v, unit, extra).0))
    };
    let clear = |extra: &usize| {
        shown(true, *extra).next().is_none_or(|best| shown(false, *extra).all(|v| v != best))
    };
    (0..2).find(clear).unwrap_or(2)
}

/// Adds the table: open for one run, and collapsed below the league table of several.
pub(super) fn push(page: &mut String, runs: &[RunView]) {
    let (open, close) = if runs.len() > 1 {
        (
            "<details class=\"card\">\n<summary><h2 id=\"h-metrics\">All figures</h2></summary>\n",
            "</details>\n",
        )
    } else {
        (
            "<section class=\"card\" aria-labelledby=\"h-metrics\">\n\
             <h2 id=\"h-metrics\">All figures</h2>\n",
            "</section>\n",
        )
    };
    page.push_str(open);
    page.push_str(
        "<div class=\"scroll\" role=\"region\" aria-labelledby=\"h-metrics\" tabindex=\"0\">\n\
         <table id=\"metrics\">\n<thead><tr><th scope=\"col\">Metric</th>",
    );
    for (i, run) in runs.iter().enumerate() {
        let _ = write!(
            page,
            "<th scope=\"col\"><span class=\"key\" data-run=\"{i}\"></span>{}</th>",
            html(&run.label)
        );
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for (row, metric) in runs[0].figures.iter().enumerate() {
        push_metric_row(page, runs, row, metric);
    }
    page.push_str("</tbody>\n</table>\n</div>\n");
    if runs.len() > 1 {
        page.push_str(
            "<p class=\"muted\">★ marks the best value of a row; ↓ and ↑ show which \
             direction is better. Point at a value to see all its digits.</p>\n",
        );
    }
    page.push_str(close);
}

fn push_metric_row(page: &mut String, runs: &[RunView], row: usize, metric: &Row) {
    let values: Vec<Option<f64>> = runs
        .iter()
        .map(|r| r.figures.get(row).and_then(|m| m.value).filter(|v| v.is_finite()))
        .collect();
    // A metric that is 0 in every run gets no row.
    if values.iter().all(|v| v.is_none_or(|v| v == 0.0)) {
        return;
    }
    let marks = best(&values, metric.better);
    let (arrow, words) = match metric.better {
        Better::Lower => ("↓", "lower is better"),
        Better::Higher => ("↑", "higher is better"),
        Better::Neither => ("", ""),
    };
    let _ = write!(page, "<tr><th scope=\"row\">{}", html(metric.label));
    let plain = matches!(metric.unit, "" | "%" | "share" | "x" | "×");
    if !plain && seconds_in(metric.unit).is_none() {
        let _ = write!(page, " <small class=\"muted\">{}</small>", html(metric.unit));
    }
    if !arrow.is_empty() {
        let _ = write!(
            page,
            "&nbsp;<span class=\"muted\" aria-hidden=\"true\" title=\"{words}\">{arrow}</span>\
             <span class=\"unseen\">, {words}</span>"
        );
    }
    page.push_str("</th>");
    let extra = extra_digits(&values, &marks, metric.unit);
    for (value, mark) in values.iter().zip(marks) {
        let Some(value) = value else {
            page.push_str("<td class=\"muted\"><span title=\"not measured\">–</span></td>");
            continue;
        };
        let (shown, full) = metric_text(*value, metric.unit, extra);
        let (class, star) = if mark {
            (
                " class=\"best\"",
                "<span aria-hidden=\"true\">★ </span><span class=\"unseen\">best: </span>",
            )
        } else {
            ("", "")
        };
        let _ = write!(
            page,
            "<td{class}>{star}<data value=\"{value}\" title=\"{}\">{}</data></td>",
            html(&full),
            html(&shown)
        );
    }
    page.push_str("</tr>\n");
}
