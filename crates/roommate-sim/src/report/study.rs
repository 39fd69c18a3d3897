//! The study of a trace as a page: distributions by job size, bars, and all tables.

use super::Frame;
use super::condense::distribution;
use super::data::{CDF_POINTS_MAX, Number, Points};
use super::text::{count, html, number};
use crate::trace::study::{Study, Table, Unit, by_class};
use crate::trace::{Trace, TraceJob};
use serde::Serialize;
use std::fmt::Write as _;

const SCRIPT: &str =
    concat!(include_str!("words.js"), include_str!("figures.js"), include_str!("study.js"));

/// Tables whose shares are drawn as bars: the columns, and whether the bars are stacked.
const BARS: &[(&str, &[&str], bool)] = &[
    ("sizes", &["of_jobs", "of_gpu_time"], false),
    ("teams", &["of_jobs", "of_gpu_time"], false),
    ("queueing_by_size", &["over_1_min", "over_10_min"], false),
    ("queueing_by_team", &["over_1_min", "over_10_min"], false),
    ("causes_by_size", &["fair_share", "fragmentation"], true),
    ("causes_by_team", &["fair_share", "fragmentation"], true),
    ("queueing_by_locality", &["over_1_min", "over_10_min"], false),
    ("utilisation", &["passed", "killed", "failed", "all"], false),
    ("utilisation_by_locality", &["mean", "p90"], false),
    ("outcomes", &["of_jobs", "of_gpu_time"], false),
    ("outcomes_by_size", &["passed", "killed", "failed", "unknown"], true),
    ("retries", &["passed", "killed", "failed"], true),
    ("failures", &["of_gpu_time"], false),
];

/// Distributions that are drawn: name, heading, column of the trace, caption.
const CURVES: [(&str, &str, &str, &str); 3] = [
    ("run", "Run time", "duration_s", "Share of the jobs that ran for at most a time."),
    ("wait", "Queueing delay", "queue_s", "Share of the jobs that started within a time."),
    ("util", "GPU utilisation", "gpu_util", "Share of the jobs with at most a GPU utilisation."),
];

/// The whole page.
pub fn study(title: &str, trace: &Trace, study: &Study) -> String {
    let data = Data::new(trace);
    let mut body = String::with_capacity(65_536);
    push_curves(&mut body, &data);
    let answered: Vec<&Table> = study.tables.iter().filter(|t| t.missing.is_empty()).collect();
    answered.iter().for_each(|table| push_table(&mut body, table));
    push_gaps(&mut body, study);
    let subtitle = format!(
        "{} · {} GPU-hours · {} trace · {} of {} tables of Jeon et al., USENIX ATC 2019",
        count(trace.jobs.len(), "job"),
        number(study.gpu_hours.round()),
        study.format,
        answered.len(),
        study.tables.len()
    );
    let (script, maker) = (SCRIPT, "roommate trace study");
    Frame { title, subtitle: &subtitle, script, maker }.around(&body, &data)
}

/// The embedded data: a "run" is a size class, which the figures draw as one curve.
#[derive(Serialize)]
struct Data {
    noun: &'static str,
    runs: Vec<Class>,
}

#[derive(Serialize)]
struct Class {
    label: String,
    run: Points,
    wait: Points,
    util: Points,
}

impl Data {
    fn new(trace: &Trace) -> Self {
        let class = |(name, jobs): (&str, Vec<&TraceJob>)| Class {
            label: format!("{name} GPU{}", if name == "1" { "" } else { "s" }),
            run: points(jobs.iter().map(|job| job.duration_s).collect()),
            wait: points(jobs.iter().filter_map(|job| job.queue_s).collect()),
            util: points(jobs.iter().filter_map(|job| job.observed().gpu_util).collect()),
        };
        Self { noun: "size", runs: by_class(&trace.jobs).into_iter().map(class).collect() }
    }

    fn has(&self, curve: &str) -> bool {
        self.runs.iter().any(|class| {
            let points = match curve {
                "run" => &class.run,
                "wait" => &class.wait,
                _ => &class.util,
            };
            !points.x.is_empty()
        })
    }
}

fn points(mut values: Vec<f64>) -> Points {
    values.sort_by(f64::total_cmp);
    let curve = distribution(&values, CDF_POINTS_MAX);
    Points {
        x: curve.iter().map(|p| Number(p.0).significant()).collect(),
        y: curve.iter().map(|p| Number(p.1).rounded(1e5)).collect(),
    }
}

/// Lists the tables that the trace cannot answer, and the columns that they need.
fn push_gaps(page: &mut String, study: &Study) {
    let gaps: Vec<&Table> = study.tables.iter().filter(|t| !t.missing.is_empty()).collect();
    if gaps.is_empty() {
        return;
    }
    page.push_str(
        "<section class=\"card\" aria-labelledby=\"h-gaps\">\n\
         <h2 id=\"h-gaps\">What this trace cannot answer</h2>\n\
         <div class=\"scroll\" role=\"region\" aria-labelledby=\"h-gaps\" tabindex=\"0\">\n\
         <table id=\"gaps\" class=\"plain wraps\"><thead><tr><th scope=\"col\">Table</th>\
         <th scope=\"col\">Columns it lacks</th></tr></thead>\n<tbody>\n",
    );
    for table in gaps {
        let columns: Vec<String> =
            table.missing.iter().map(|c| format!("<code>{}</code>", html(c))).collect();
        let _ = writeln!(
            page,
            "<tr><th scope=\"row\">{}</th><td>{}</td></tr>",
            html(table.title),
            columns.join(", ")
        );
    }
    page.push_str("</tbody></table>\n</div>\n</section>\n");
}

fn push_curves(page: &mut String, data: &Data) {
    page.push_str("<div class=\"charts even\">\n");
    for (id, heading, column, about) in CURVES {
        if !data.has(id) {
            continue;
        }
        let _ = write!(
            page,
            "<figure class=\"card\" id=\"fig-{id}\" aria-labelledby=\"h-{id}\">\n\
             <div class=\"bar\"><h2 id=\"h-{id}\">{heading}</h2></div>\n\
             <div class=\"plot\"></div>\n<ul class=\"legend\"></ul>\n\
             <figcaption class=\"muted\">{about} Column <code>{column}</code>.</figcaption>\n\
             </figure>\n"
        );
    }
    page.push_str("</div>\n");
}

fn push_table(page: &mut String, table: &Table) {
    let id = table.id;
    let _ = write!(
        page,
        "<section class=\"card\" aria-labelledby=\"h-{id}\">\n<h2 id=\"h-{id}\">{}</h2>\n\
         <div class=\"beside\">\n",
        html(table.title)
    );
    if let Some((_, keys, stacked)) = BARS.iter().find(|(of, ..)| *of == id) {
        push_bars(page, table, keys, *stacked);
    }
    let _ = write!(
        page,
        "<div class=\"scroll\" role=\"region\" aria-labelledby=\"h-{id}\" tabindex=\"0\">\n\
         <table id=\"{id}\">\n<thead><tr>"
    );
    for column in &table.columns {
        let _ = write!(page, "<th scope=\"col\">{}</th>", html(column.head));
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for row in &table.rows {
        let _ = write!(page, "<tr><th scope=\"row\">{}</th>", html(&row.name));
        for (shown, value) in table.cells(row).iter().skip(1).zip(&row.cells) {
            let _ = match value {
                Some(value) => {
                    write!(page, "<td><data value=\"{value}\">{}</data></td>", html(shown))
                }
                None => write!(page, "<td class=\"muted\">–</td>"),
            };
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody>\n</table>\n</div>\n</div>\n");
    if table.left_out > 0 {
        let jobs = count(table.left_out as usize, "job");
        let _ = writeln!(page, "<p class=\"muted\">Without {jobs} with unknown values.</p>");
    }
    page.push_str("</section>\n");
}

/// Height in pixels of one bar among several, and of a single bar.
const THIN: usize = 9;
const THICK: usize = 14;

/// Bars of some share columns, one lane for each row. The table beside them has the numbers, so the
/// bars are hidden from screen readers.
fn push_bars(page: &mut String, table: &Table, keys: &[&str], stacked: bool) {
    let series: Vec<(usize, &str)> = (table.columns.iter().enumerate())
        .filter(|(_, column)| column.unit == Unit::Share && keys.contains(&column.key))
        .map(|(i, column)| (i - 1, column.head))
        .collect();
    page.push_str("<div class=\"bars\" aria-hidden=\"true\">\n<ul class=\"legend\">");
    for (i, (_, head)) in series.iter().enumerate() {
        let _ = write!(page, "<li><svg class=\"swatch s{i}\"><rect/></svg>{}</li>", html(head));
    }
    page.push_str("</ul>\n<div class=\"lanes\">\n");
    // The row of all jobs would always show 100 %.
    let whole = keys.contains(&"of_gpu_time");
    for row in table.rows.iter().filter(|row| !(whole && row.name == "all")) {
        let height = if stacked { THICK } else { series.len() * (THIN + 1) };
        let _ = write!(
            page,
            "<span>{}</span><svg class=\"lane\" height=\"{height}\">",
            html(&row.name)
        );
        let mut from = 0.0;
        for (i, (cell, head)) in series.iter().enumerate() {
            let Some(share) = row.cells[*cell].filter(|share| *share > 0.0) else { continue };
            let (x, y, thick) =
                if stacked { (from, 0, THICK) } else { (0.0, i * (THIN + 1), THIN) };
            from += share * 100.0;
            let _ = write!(
                page,
                "<rect class=\"s{i}\" x=\"{x:.2}%\" y=\"{y}\" width=\"{:.2}%\" \
                 height=\"{thick}\"><title>{}: {} {:.1} %</title></rect>",
                share * 100.0,
                html(&row.name),
                html(head),
                share * 100.0
            );
        }
        page.push_str("</svg>\n");
    }
    page.push_str("</div>\n</div>\n");
}
