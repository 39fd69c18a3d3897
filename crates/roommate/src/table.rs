//! Tables for a terminal: aligned, plain without colour, the best of a row marked.

use roommate_core::journal::metrics::{Better, Metrics, ServiceFigures};
use std::fmt::Write;

/// Lays out cells in aligned columns; the first column to the left, the others to the right.
pub(crate) fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        let cells = rows.iter().filter_map(|r| r.get(c));
        cells.map(|s| s.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let width = widths[c];
            let _ = if c == 0 {
                write!(line, "{cell:width$}")
            } else {
                write!(line, "  {cell:>width$}")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Left-aligned columns, for words.
pub(crate) fn align_left(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut padded = rows.to_vec();
    for c in 0..columns {
        let width = rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max();
        for row in padded.iter_mut().filter(|r| r.len() > c) {
            row[c] = format!("{:w$}", row[c], w = width.unwrap_or(0));
        }
    }
    let mut text = String::new();
    for row in padded {
        text.push_str(row.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// So many of something.
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A figure for a person.
pub(crate) fn figure(value: Option<f64>, unit: &str) -> String {
    let Some(v) = value else { return "-".into() };
    match unit {
        "share" => format!("{:.1}%", v * 100.0),
        "s" => duration(v),
        "ms" => format!("{v:.1} ms"),
        "/s" => format!("{v:.1}/s"),
        _ if v == v.trunc() && v.abs() < 1e15 => format!("{v:.0}"),
        _ => format!("{v:.3}"),
    }
}

/// Seconds with a unit that keeps three or four digits before the reader's eyes.
fn duration(s: f64) -> String {
    match s {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7_200.0 => format!("{:.1} min", s / 60.0),
        s if s < 360_000.0 => format!("{:.2} h", s / 3_600.0),
        _ => format!("{:.2} d", s / 86_400.0),
    }
}

/// Services shown one by one: those that were late most.
const SERVICES_SHOWN: usize = 24;

/// A row for each service, those that were late most first; nothing without services.
pub(crate) fn services(metrics: &Metrics) -> String {
    let late = |s: &ServiceFigures| s.served.late as f64 / s.served.requests.max(1) as f64;
    let mut worst: Vec<&ServiceFigures> = metrics.services.iter().collect();
    worst.sort_by(|a, b| late(b).total_cmp(&late(a)));
    if worst.is_empty() {
        return String::new();
    }
    let head =
        ["service", "objective", "median", "p99", "worst p99", "late", "windows over", "in time"];
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

/// A column for each run, a row for each figure, the best of each row marked with a star.
pub(crate) fn metrics(runs: &[(String, Metrics)]) -> String {
    let columns: Vec<_> = runs.iter().map(|(_, m)| m.rows()).collect();
    // Figures end in room for a star; the names above them do too.
    let names = runs.iter().map(|r| format!("{}  ", r.0));
    let mut rows = vec![std::iter::once(String::new()).chain(names).collect::<Vec<_>>()];
    let Some(first) = columns.first() else { return String::new() };
    for (i, row) in first.iter().enumerate() {
        let values: Vec<Option<f64>> = columns.iter().map(|c| c[i].value).collect();
        // What happened to nobody is not worth a line.
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
    in_blocks(&rows) + note
}

/// Wide tables are cut into blocks of columns that fit a terminal, each with the names of the rows.
fn in_blocks(rows: &[Vec<String>]) -> String {
    const WIDTH: usize = 120;
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0) + 2;
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    let mut used = 0;
    for c in 1..rows[0].len() {
        if used == 0 || used + width(c) > WIDTH {
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

/// The best value of a row, if there is something to choose.
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
    fn the_best_is_marked_only_where_there_is_a_choice() {
        let values = [Some(3.0), None, Some(1.0), Some(1.0)];
        assert_eq!(best(&values, Better::Lower), Some(1.0));
        assert_eq!(best(&values, Better::Higher), Some(3.0));
        assert_eq!(best(&values, Better::Neither), None);
        assert_eq!(best(&[Some(2.0), Some(2.0)], Better::Lower), None);
        assert_eq!(best(&[Some(2.0)], Better::Lower), None);
    }

    #[test]
    fn figures_read_well() {
        let shown = |v, u| figure(Some(v), u);
        assert_eq!(shown(0.317, "share"), "31.7%");
        assert_eq!(shown(90.0, "s"), "90.0 s");
        assert_eq!(shown(5_400.0, "s"), "90.0 min");
        assert_eq!(shown(193_082.0, "s"), "53.63 h");
        assert_eq!(shown(12.0, ""), "12");
        assert_eq!(figure(None, "s"), "-");
    }
}
