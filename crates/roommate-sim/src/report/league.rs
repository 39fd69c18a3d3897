//! The league table: a row for each run, best first, with the most important metrics. The terminal
//! and the page show the same rows in the same order.

use super::RunView;
use super::all_figures::{best, metric_text};
use super::text::html;
use roommate_core::journal::metrics::{Better, Row};
use roommate_core::policy::{self, Entry};
use std::fmt::Write as _;

/// Default metric by which runs are sorted.
pub const SORTED_BY: &str = "avg_jct_s";

/// The metrics of the table: key and column heading.
const FIGURES: [(&str, &str); 8] = [
    ("avg_jct_s", "mean JCT"),
    ("p99_jct_s", "p99 JCT"),
    ("makespan_s", "makespan"),
    ("avg_queue_s", "mean wait"),
    ("gpu_util", "GPU held"),
    ("finished", "finished"),
    ("slo_misses", "SLO misses"),
    ("deadline_misses", "late jobs"),
];

/// The order of runs and the columns of the table.
pub struct League {
    /// The runs, best first.
    pub order: Vec<usize>,
    /// The metrics that are informative for these runs.
    pub columns: Vec<Column>,
}

/// A metric of all runs.
pub struct Column {
    /// Key of the metric.
    pub key: &'static str,
    /// Column heading.
    pub head: &'static str,
    /// Unit, as in [`Row`].
    pub unit: &'static str,
    /// Which direction is better.
    pub better: Better,
    /// Values by run.
    pub values: Vec<Option<f64>>,
    /// By run: whether its value is the best; all false if the values are equal.
    pub best: Vec<bool>,
}

impl League {
    /// The league of runs with these metrics, sorted by the metric with key `sort`.
    pub fn new(runs: &[Vec<Row>], sort: &str) -> Self {
        let shown = |(key, head): &(&'static str, &'static str)| {
            Column::new(runs, key, head).filter(|c| c.matters(runs))
        };
        Self { order: sorted(runs, sort), columns: FIGURES.iter().filter_map(shown).collect() }
    }

    /// Adds a row of which only one metric is known, and which does not compete; returns its index.
    pub fn add(&mut self, key: &str, value: f64) -> usize {
        for column in &mut self.columns {
            column.values.push((column.key == key).then_some(value));
            column.best.push(false);
        }
        self.columns.first().map_or(0, |c| c.values.len() - 1)
    }
}

impl Column {
    fn new(runs: &[Vec<Row>], key: &'static str, head: &'static str) -> Option<Self> {
        let row = runs.first()?.iter().find(|r| r.key == key)?;
        let values = values(runs, key);
        let best = best(&values, row.better);
        Some(Self { key, head, unit: row.unit, better: row.better, values, best })
    }

    /// Whether the metric is informative: "finished" is left out if all jobs finished.
    fn matters(&self, runs: &[Vec<Row>]) -> bool {
        match self.head {
            "finished" => self.values != values(runs, "jobs"),
            _ => self.values.iter().any(Option::is_some),
        }
    }
}

fn values(runs: &[Vec<Row>], key: &str) -> Vec<Option<f64>> {
    let value = |rows: &Vec<Row>| rows.iter().find(|r| r.key == key)?.value;
    runs.iter().map(|rows| value(rows).filter(|v| v.is_finite())).collect()
}

/// The runs by a metric, best first, runs without a value last. If neither direction is better, the
/// largest value comes first.
fn sorted(runs: &[Vec<Row>], key: &str) -> Vec<usize> {
    let row = runs.first().and_then(|rows| rows.iter().find(|r| r.key == key));
    let lower = row.is_none_or(|r| r.better == Better::Lower);
    let values = values(runs, key);
    let rank = |i: &usize| match values[*i] {
        Some(v) => {
            if lower {
                v
            } else {
                -v
            }
        }
        None => f64::INFINITY,
    };
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by(|a, b| rank(a).total_cmp(&rank(b)));
    order
}

/// Family of a policy, and whether it knows durations.
pub fn about(policy: &str) -> [&'static str; 2] {
    let known = |e: &Entry| [e.family.name(), if e.knows_durations { "yes" } else { "no" }];
    policy::find(policy).map_or(["–", "–"], known)
}

/// Adds the section with the table, in which runs are selected for the figures below.
pub(super) fn push(page: &mut String, runs: &[RunView], league: &League) {
    page.push_str(
        "<section class=\"card\" aria-labelledby=\"h-league\">\n\
         <h2 id=\"h-league\">Best first</h2>\n\
         <div class=\"scroll\" role=\"region\" aria-labelledby=\"h-league\" tabindex=\"0\">\n\
         <table id=\"league\">\n<thead><tr><th scope=\"col\">Run</th>\
         <th scope=\"col\" class=\"word\">Family</th>\
         <th scope=\"col\" class=\"word\">Knows durations</th>",
    );
    for column in &league.columns {
        let _ = write!(page, "<th scope=\"col\">{}</th>", column.head);
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for run in &league.order {
        push_run(page, *run, &runs[*run], &league.columns);
    }
    let _ = write!(
        page,
        "</tbody>\n</table>\n</div>\n<p class=\"muted\">★ marks the best value of a column; the \
         length of a bar is proportional to the value. JCT: job completion time, from submission \
         to the end. Click a run to draw its curves in the figures below. At most {} runs are \
         drawn; a further run replaces one of them.</p>\n</section>\n",
        super::DRAWN_MAX
    );
}

fn push_run(page: &mut String, i: usize, run: &RunView, columns: &[Column]) {
    let [family, knows] = about(&run.policy);
    let _ = write!(
        page,
        "<tr><th scope=\"row\"><button type=\"button\" class=\"pick\" data-run=\"{i}\" \
         aria-pressed=\"false\"><span class=\"key\" data-run=\"{i}\"></span>{}</button></th>\
         <td class=\"word\">{family}</td><td class=\"word\">{knows}</td>",
        html(&run.label)
    );
    for column in columns {
        push_cell(page, i, column);
    }
    page.push_str("</tr>\n");
}

/// Adds a value with its bar. A value shown with the same digits as the best is marked like it.
fn push_cell(page: &mut String, run: usize, column: &Column) {
    let Some(value) = column.values[run] else {
        page.push_str("<td class=\"muted\"><span title=\"not measured\">–</span></td>");
        return;
    };
    let shown = |value: f64| metric_text(value, column.unit, 0).0;
    let best = column.best.iter().position(|b| *b).and_then(|i| column.values[i]).map(shown);
    let (class, star) = if best.is_some_and(|best| best == shown(value)) {
        (
            " class=\"best\"",
            "<span aria-hidden=\"true\">★ </span><span class=\"unseen\">best: </span>",
        )
    } else {
        ("", "")
    };
    let longest = column.values.iter().flatten().fold(0.0, |a: f64, b| a.max(*b));
    let width = if longest > 0.0 { 100.0 * value / longest } else { 0.0 };
    let _ = write!(
        page,
        "<td{class}>{star}<data value=\"{value}\" title=\"{}\">{}</data>\
         <svg class=\"meter\" viewBox=\"0 0 100 4\" preserveAspectRatio=\"none\" \
         aria-hidden=\"true\"><rect width=\"{width:.2}\" height=\"4\"></rect></svg></td>",
        html(&metric_text(value, column.unit, 0).1),
        html(&shown(value))
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::journal::metrics::Metrics;

    fn rows(jct_s: Option<f64>, finished: u64, held: f64) -> Vec<Row> {
        let gpu_util = Some(held);
        Metrics { jobs: 9, finished, avg_jct_s: jct_s, gpu_util, ..Metrics::default() }.rows()
    }

    #[test]
    fn runs_are_sorted_best_first() {
        let runs = [rows(None, 9, 0.5), rows(Some(8.0), 9, 0.3), rows(Some(2.0), 9, 0.4)];
        assert_eq!(League::new(&runs, "avg_jct_s").order, [2, 1, 0]);
        assert_eq!(League::new(&runs, "gpu_util").order, [0, 2, 1]);
        // Equal runs keep their order.
        assert_eq!(League::new(&runs, "makespan_s").order, [0, 1, 2]);
    }

    #[test]
    fn uninformative_columns_are_left_out() {
        let heads = |runs: &[Vec<Row>]| -> Vec<&str> {
            League::new(runs, SORTED_BY).columns.iter().map(|c| c.head).collect()
        };
        let all = [rows(Some(1.0), 9, 0.5), rows(Some(2.0), 9, 0.5)];
        assert_eq!(heads(&all), ["mean JCT", "makespan", "GPU held"]);
        let some = [rows(Some(1.0), 9, 0.5), rows(Some(2.0), 8, 0.5)];
        assert_eq!(heads(&some), ["mean JCT", "makespan", "GPU held", "finished"]);
        let best: Vec<bool> = League::new(&some, SORTED_BY).columns[3].best.clone();
        assert_eq!(best, [true, false]);
    }

    #[test]
    fn every_key_of_the_table_is_a_metric() {
        let rows = Metrics::default().rows();
        for (key, _) in FIGURES {
            assert!(rows.iter().any(|r| r.key == key), "{key}");
        }
        assert_eq!(FIGURES[0].0, SORTED_BY);
    }
}
