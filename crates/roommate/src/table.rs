//! Tables for a terminal: aligned, without colour, with the best of a row or column marked.

use crate::console;
use roommate_core::journal::metrics::{Better, Metrics, ServiceFigures};
use roommate_sim::report::league::Column;
use std::fmt::Write;

/// Aligns columns: the first to the left, the others to the right.
pub(crate) fn align(rows: &[Vec<String>]) -> String {
    align_words(rows, 1)
}

/// Aligns all columns to the left.
pub(crate) fn align_left(rows: &[Vec<String>]) -> String {
    align_words(rows, usize::MAX)
}

/// Aligns the first `words` columns to the left and the others to the right.
fn align_words(rows: &[Vec<String>], words: usize) -> String {
    // Cells may contain what other users wrote.
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(console::printable).collect()).collect();
    let widths = widths(&rows);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(c, (cell, width))| {
            if c < words { format!("{cell:width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join(GAP).trim_end());
        text.push('\n');
    }
    text
}

/// Between two columns.
pub(crate) const GAP: &str = "  ";

fn widths(rows: &[Vec<String>]) -> Vec<usize> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        let cells = rows.iter().filter_map(|r| r.get(c));
        cells.map(|s| s.chars().count()).max().unwrap_or(0)
    };
    (0..columns).map(width).collect()
}

/// A count with its noun, with a plural s.
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A value with its unit.
pub(crate) fn figure(value: Option<impl Into<f64>>, unit: &str) -> String {
    let Some(v) = value.map(Into::into) else { return "-".into() };
    match unit {
        "share" => format!("{:.1}%", v * 100.0),
        "s" => duration(v),
        "ms" => format!("{v:.1} ms"),
        "/s" => format!("{v:.1}/s"),
        _ if v == v.trunc() && v.abs() < 1e15 => format!("{v:.0}"),
        _ => format!("{v:.3}"),
    }
}

/// A duration in a unit that gives three or four digits.
fn duration(s: f64) -> String {
    match time_unit(s) {
        (scale, unit @ ("s" | "min")) => format!("{:.1} {unit}", s * scale),
        (scale, unit) => format!("{:.2} {unit}", s * scale),
    }
}

/// Most services that are listed: those with the most late requests.
const SERVICES_SHOWN: usize = 24;

/// A row for each service, most late requests first; empty without services.
pub(crate) fn services(metrics: &Metrics) -> String {
    let late = |s: &ServiceFigures| s.served.late as f64 / s.served.requests.max(1) as f64;
    let mut worst: Vec<&ServiceFigures> = metrics.services.iter().collect();
    worst.sort_by(|a, b| late(b).total_cmp(&late(a)));
    if worst.is_empty() {
        return String::new();
    }
    let head = ["service", "SLO", "median", "p99", "worst p99", "late", "windows over", "in time"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let ms = |us: u32| figure(Some(f64::from(us) / 1e3), "ms");
    for s in worst.iter().take(SERVICES_SHOWN) {
        let over = f64::from(s.served.over) / f64::from(s.served.windows);
        rows.push(vec![
            s.name.clone(),
            s.slo_us.map_or("-".into(), ms),
            ms(s.served.p50_us),
            ms(s.served.p99_us),
            ms(s.served.worst_us),
            format!("{:.2}%", 100.0 * late(s)),
            format!("{:.2}%", 100.0 * over),
            figure(Some(s.goodput_rps), "/s"),
        ]);
    }
    let mut text = align(&rows);
    if let Some(next) = worst.get(SERVICES_SHOWN) {
        let more = worst.len() - SERVICES_SHOWN;
        let _ = writeln!(text, "{more} more, at most {:.2}% late", 100.0 * late(next));
    }
    text
}

/// A row of the league table.
pub(crate) struct Standing {
    pub(crate) name: String,
    /// Family of the policy, and whether it knows durations.
    pub(crate) about: [&'static str; 2],
    /// Index of the run in the columns.
    pub(crate) run: usize,
}

/// A row for each run in the given order, with the best of each column marked with a star. On a
/// narrow terminal the columns about the policy are left out.
pub(crate) fn league(standings: &[Standing], columns: &[Column], width: Option<usize>) -> String {
    let heads = [["", "", ""], ["", "", "knows"], ["policy", "family", "durations"]];
    let mut rows: Vec<Vec<String>> = heads.map(|h| h.map(String::from).to_vec()).to_vec();
    for standing in standings {
        let [family, knows] = standing.about.map(String::from);
        rows.push(vec![standing.name.clone(), family, knows]);
    }
    for column in columns {
        let (heads, cells) = figures(column);
        let cells = standings.iter().map(|s| cells[s.run].clone());
        rows.iter_mut().zip(heads.into_iter().chain(cells)).for_each(|(row, cell)| row.push(cell));
    }
    let mut words = 3;
    while words > 1 && width.is_some_and(|w| line_width(&rows) > w) {
        rows.iter_mut().for_each(|row| drop(row.remove(1)));
        words -= 1;
    }
    let note = if standings.len() > 1 { "* best of its column\n" } else { "" };
    align_words(&rows, words) + note
}

fn line_width(rows: &[Vec<String>]) -> usize {
    let widths = widths(rows);
    widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1)
}

/// The three heading lines of a column of the league table, and its cells by run, all in one unit.
/// A value shown with the same digits as the best is marked like it.
fn figures(column: &Column) -> ([String; 3], Vec<String>) {
    let (scale, unit) = match column.unit {
        "s" => time_unit(typical(&column.values)),
        "share" => (100.0, "%"),
        unit => (1.0, unit),
    };
    let decimals = match (column.unit, typical(&column.values) * scale) {
        ("", _) => 0,
        ("share", _) => 1,
        (_, v) if v < 10.0 => 2,
        (_, v) if v < 100.0 => 1,
        _ => 0,
    };
    let shown = |value: &Option<f64>| value.map(|v| format!("{:.decimals$}", v * scale));
    let best = column.values.iter().zip(&column.best).find(|(_, best)| **best);
    let best = best.and_then(|(value, _)| shown(value));
    // If a cell is marked, the others get a space, so that digits stay aligned.
    let none = if best.is_some() { " " } else { "" };
    let cell = |value: &Option<f64>| match shown(value) {
        text if text.is_some() && text == best => format!("{}*", text.unwrap_or_default()),
        text => format!("{}{none}", text.unwrap_or("-".into())),
    };
    let (above, below) = column.head.split_once(' ').unwrap_or(("", column.head));
    let heads = [above, below, unit].map(|head| format!("{head}{none}"));
    (heads, column.values.iter().map(cell).collect())
}

/// The median, from which the unit of a column is chosen.
fn typical(values: &[Option<f64>]) -> f64 {
    let mut known: Vec<f64> = values.iter().flatten().copied().collect();
    known.sort_by(f64::total_cmp);
    known.get(known.len() / 2).copied().unwrap_or(0.0)
}

/// A suitable unit for a duration: factor from seconds, and name.
fn time_unit(s: f64) -> (f64, &'static str) {
    match s {
        s if s < 120.0 => (1.0, "s"),
        s if s < 7_200.0 => (1.0 / 60.0, "min"),
        s if s < 360_000.0 => (1.0 / 3_600.0, "h"),
        _ => (1.0 / 86_400.0, "d"),
    }
}

/// Width of a table if the width of the terminal is not known.
pub(crate) const WIDTH: usize = 120;

/// A column for each run and a row for each metric, with the best of each row marked with a star.
pub(crate) fn metrics(runs: &[(String, Metrics)]) -> String {
    metrics_within(runs, WIDTH)
}

/// The same, in blocks of at most `width` columns of text.
pub(crate) fn metrics_within(runs: &[(String, Metrics)], width: usize) -> String {
    let columns: Vec<_> = runs.iter().map(|(_, m)| m.rows()).collect();
    // Cells end with room for a star, and so do the names above them.
    let names = runs.iter().map(|r| format!("{}  ", r.0));
    let mut rows = vec![std::iter::once(String::new()).chain(names).collect::<Vec<_>>()];
    let Some(first) = columns.first() else { return String::new() };
    for (i, row) in first.iter().enumerate() {
        let values: Vec<Option<f64>> = columns.iter().map(|c| c[i].value).collect();
        // A metric that is 0 in every run gets no line.
        if values.iter().all(|v| v.is_none_or(|v| v == 0.0)) {
            continue;
        }
        let best = best(&values, row.better);
        let cells = values.iter().map(|v| {
            let star = if best.is_some() && *v == best { " *" } else { "" };
            format!("{}{star:2}", figure(*v, row.unit))
        });
        rows.push(std::iter::once(row.label.to_string()).chain(cells).collect());
    }
    let note = if runs.len() > 1 { "* best of its row\n" } else { "" };
    in_blocks(&rows, width) + note
}

/// Splits a wide table into blocks of columns that fit a terminal, each with the names of the rows.
fn in_blocks(rows: &[Vec<String>], most: usize) -> String {
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0) + 2;
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    let mut used = 0;
    for c in 1..rows[0].len() {
        if used == 0 || used + width(c) > most {
            blocks.push(vec![0]);
            used = width(0);
        }
        used += width(c);
        if let Some(block) = blocks.last_mut() {
            block.push(c);
        }
    }
    let cut = |block: &Vec<usize>| {
        let part: Vec<Vec<String>> =
            rows.iter().map(|r| block.iter().map(|c| r[*c].clone()).collect()).collect();
        align(&part)
    };
    blocks.iter().map(cut).collect::<Vec<_>>().join("\n")
}

/// The best value of a row; `None` if all are equal.
fn best(values: &[Option<f64>], better: Better) -> Option<f64> {
    let known = values.iter().flatten().copied();
    let best = match better {
        Better::Lower => known.clone().min_by(f64::total_cmp),
        Better::Higher => known.clone().max_by(f64::total_cmp),
        Better::Neither => None,
    }?;
    known.clone().any(|v| v != best).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let rows = [vec!["command".to_string(), "printf '\u{1b}[2J\u{9b}'\nls\u{7}".into()]];
        assert_eq!(align_left(&rows), "command  printf '\\u{1b}[2J\\u{9b}'\\nls\\u{7}\n");
    }

    #[test]
    fn the_best_is_marked_unless_all_are_equal() {
        let values = [Some(3.0), None, Some(1.0), Some(1.0)];
        assert_eq!(best(&values, Better::Lower), Some(1.0));
        assert_eq!(best(&values, Better::Higher), Some(3.0));
        assert_eq!(best(&values, Better::Neither), None);
        assert_eq!(best(&[Some(2.0), Some(2.0)], Better::Lower), None);
        assert_eq!(best(&[Some(2.0)], Better::Lower), None);
    }

    fn column(head: &'static str, unit: &'static str, values: &[f64]) -> Column {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let best = values.iter().map(|v| *v == least).collect();
        let values = values.iter().copied().map(Some).collect();
        Column { key: head, head, unit, better: Better::Lower, values, best }
    }

    #[test]
    fn a_league_has_one_unit_per_column() {
        let columns = [
            column("mean JCT", "s", &[9_000.0, 9_001.0, 72_000.0]),
            column("SLO misses", "share", &[0.5, 0.25, 0.0]),
        ];
        let standing = |(run, name): (usize, &str)| Standing {
            name: name.into(),
            about: ["queue", "no"],
            run,
        };
        let standings: Vec<Standing> =
            ["a", "b", "long"].into_iter().enumerate().map(standing).collect();
        expect_test::expect![[r#"
                                        mean      SLO
                            knows        JCT   misses
            policy  family  durations      h        %
            a       queue   no          2.50*    50.0
            b       queue   no          2.50*    25.0
            long    queue   no         20.00      0.0*
            * best of its column
        "#]]
        .assert_eq(&league(&standings, &columns, None));
        expect_test::expect![[r#"
                     mean      SLO
                      JCT   misses
            policy      h        %
            a        2.50*    50.0
            b        2.50*    25.0
            long    20.00      0.0*
            * best of its column
        "#]]
        .assert_eq(&league(&standings, &columns, Some(28)));
    }

    #[test]
    fn values_have_suitable_units() {
        let shown = |v, u| figure(Some(v), u);
        assert_eq!(shown(0.317, "share"), "31.7%");
        assert_eq!(shown(90.0, "s"), "90.0 s");
        assert_eq!(shown(5_400.0, "s"), "90.0 min");
        assert_eq!(shown(193_082.0, "s"), "53.63 h");
        assert_eq!(shown(12.0, ""), "12");
        assert_eq!(figure(None::<f64>, "s"), "-");
    }
}
