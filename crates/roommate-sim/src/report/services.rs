//! The section about services: a table with a strip chart of latency over time for each service.
//! The charts are static SVG without zoom, so no script is needed.

use super::text::{exact, html, number};
use super::{RunView, ServiceView, Stretch};
use std::fmt::Write as _;

/// Most services of one run that are listed: those with the most late requests.
const SHOWN: usize = 24;
/// Columns of a strip, and its size in pixels.
const COLUMNS: usize = 120;
const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 36.0;
/// Height of the SLO in a strip, as a share; latencies above twice the SLO are clipped.
const OBJECTIVE: f64 = 0.5;

/// Adds the section, if any run has services.
pub(super) fn push(page: &mut String, runs: &[RunView]) {
    if runs.iter().all(|r| r.services.is_empty()) {
        return;
    }
    page.push_str(
        "<section class=\"card\" aria-labelledby=\"h-services\">\n\
         <h2 id=\"h-services\">Services</h2>\n<p class=\"muted\">Bars show the 99th percentile of \
         latency over the run: dark is the mean of the windows, light the worst window, and red \
         marks windows that miss the SLO. The line is the SLO; the scale ends at twice the \
         SLO.</p>\n",
    );
    for run in runs.iter().filter(|r| !r.services.is_empty()) {
        push_run(page, run);
    }
    page.push_str("</section>\n");
}

fn push_run(page: &mut String, run: &RunView) {
    let mut worst: Vec<&ServiceView> = run.services.iter().collect();
    worst.sort_by(|a, b| b.late.total_cmp(&a.late).then(b.over.total_cmp(&a.over)));
    let label = html(&run.label);
    let _ = write!(
        page,
        "<div class=\"scroll\" role=\"region\" aria-label=\"Services of {label}\" tabindex=\"0\">\n\
         <table class=\"services\">\n<caption>{label}</caption>\n<thead><tr>\
         <th scope=\"col\">Service</th>\
         <th scope=\"col\">SLO</th><th scope=\"col\">median</th><th scope=\"col\">p99</th>\
         <th scope=\"col\">worst</th><th scope=\"col\">late</th>\
         <th scope=\"col\">windows over</th><th scope=\"col\">in time</th>\
         <th scope=\"col\">p99 over time</th></tr></thead>\n<tbody>\n"
    );
    for service in worst.iter().take(SHOWN) {
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        let ms = |ms: f64| format!("{} ms", number(ms));
        let slo = service.slo_ms.map_or("–".into(), ms);
        let _ = writeln!(
            page,
            "<tr><th scope=\"row\">{}</th><td>{slo}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{}</td><td>{}</td><td>{}/s</td><td>{}</td></tr>",
            html(&service.name),
            ms(service.p50_ms),
            ms(service.p99_ms),
            ms(service.worst_ms),
            percent(service.late),
            percent(service.over),
            number(service.goodput_rps),
            strip(service, run.end_s),
        );
    }
    page.push_str("</tbody>\n</table>\n</div>\n");
    if worst.len() > SHOWN {
        let rest = &worst[SHOWN..];
        let late = rest.iter().map(|s| s.late).fold(0.0, f64::max);
        let _ = writeln!(
            page,
            "<p class=\"muted\">{} more services, each with at most {:.2} % of its requests \
             late.</p>",
            rest.len(),
            100.0 * late
        );
    }
}

/// One column of a strip.
#[derive(Clone, Copy, Default, PartialEq)]
struct Column {
    p99_ms: f64,
    worst_ms: f64,
    over: bool,
}

/// For each column of the strip the worst of the reports that overlap it.
fn columns(stretches: &[Stretch], end_s: f64) -> Vec<Column> {
    let mut columns = vec![Column::default(); COLUMNS];
    let at = |s: f64| (s / end_s.max(1e-9) * COLUMNS as f64).clamp(0.0, COLUMNS as f64);
    for stretch in stretches {
        let (from, to) = (at(stretch.from_s).floor() as usize, at(stretch.to_s).ceil() as usize);
        for column in &mut columns[from.min(COLUMNS - 1)..to.clamp(from + 1, COLUMNS)] {
            column.p99_ms = column.p99_ms.max(stretch.p99_ms);
            column.worst_ms = column.worst_ms.max(stretch.worst_ms);
            column.over |= stretch.over > 0.0;
        }
    }
    columns
}

fn strip(service: &ServiceView, end_s: f64) -> String {
    let columns = columns(&service.stretches, end_s);
    // Without an SLO the worst window takes half of the height.
    let full_ms = service.slo_ms.unwrap_or(service.worst_ms).max(1e-6) / OBJECTIVE;
    let summary = format!(
        "p99 {} ms on average, {} ms at worst",
        exact((service.p99_ms * 10.0).round() / 10.0),
        exact((service.worst_ms * 10.0).round() / 10.0)
    );
    let mut svg = format!(
        "<svg class=\"strip\" role=\"img\" aria-label=\"{summary}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\">\
         <title>{summary}</title>"
    );
    let width = WIDTH / COLUMNS as f64;
    let mut bar = |class: &str, from: usize, to: usize, ms: f64| {
        let height = (ms / full_ms).min(1.0) * HEIGHT;
        let _ = write!(
            svg,
            "<rect class=\"{class}\" x=\"{}\" y=\"{:.1}\" width=\"{}\" height=\"{height:.1}\"/>",
            from as f64 * width,
            HEIGHT - height,
            (to - from) as f64 * width,
        );
    };
    let mut from = 0;
    for same in columns.chunk_by(|a, b| a == b) {
        let to = from + same.len();
        let column = same[0];
        if column.worst_ms > 0.0 {
            bar(if column.over { "over" } else { "worst" }, from, to, column.worst_ms);
            // A mean above the SLO would cover the red bar.
            let late = service.slo_ms.is_some_and(|slo| column.p99_ms > slo);
            if !late {
                bar("mean", from, to, column.p99_ms);
            }
        }
        from = to;
    }
    if service.slo_ms.is_some() {
        let y = HEIGHT * (1.0 - OBJECTIVE);
        let _ = write!(svg, "<line x1=\"0\" y1=\"{y}\" x2=\"{WIDTH}\" y2=\"{y}\"/>");
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(from_s: f64, to_s: f64, p99_ms: f64, over: f64) -> Stretch {
        Stretch { from_s, to_s, p99_ms, worst_ms: 2.0 * p99_ms, over }
    }

    #[test]
    fn a_strip_shows_the_worst_report_of_each_column() {
        let reports = [stretch(0.0, 50.0, 10.0, 0.0), stretch(50.0, 100.0, 40.0, 0.1)];
        let drawn = columns(&reports, 100.0);
        assert!(
            drawn[..60].iter().all(|c| *c == Column { p99_ms: 10.0, worst_ms: 20.0, over: false })
        );
        assert!(
            drawn[60..].iter().all(|c| *c == Column { p99_ms: 40.0, worst_ms: 80.0, over: true })
        );
        // A short report still gets a column.
        let short = columns(&[stretch(99.99, 100.0, 5.0, 1.0)], 1e6);
        assert_eq!(short.iter().filter(|c| c.over).count(), 1);
    }
}
