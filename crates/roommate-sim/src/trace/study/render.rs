//! The study as text and as CSV.

use super::{Row, Study, Table, Unit};
use crate::trace::stats::render::{fitted, grouped, percent, time};
use std::fmt::{self, Display, Formatter, Write as _};

impl Display for Study {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let hours = grouped(self.gpu_hours.round() as u64);
        writeln!(f, "{} jobs, {hours} GPU-hours, {} trace", grouped(self.jobs), self.format)?;
        self.tables.iter().try_for_each(|table| write!(f, "\n{table}"))
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        if !self.missing.is_empty() {
            return writeln!(f, "  not answered: the trace has no {}", self.missing.join(", "));
        }
        let head = self.columns.iter().map(|column| column.head.to_owned()).collect();
        let lines = self.rows.iter().map(|row| self.cells(row));
        let lines: Vec<Vec<String>> = std::iter::once(head).chain(lines).collect();
        let width = |c: usize| lines.iter().map(|line| line[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for line in &lines {
            write!(f, "  {:width$}", line[0], width = widths[0])?;
            for (cell, width) in line.iter().zip(&widths).skip(1) {
                write!(f, "  {cell:>width$}")?;
            }
            writeln!(f)?;
        }
        if self.left_out > 0 {
            let jobs = grouped(self.left_out);
            writeln!(f, "  without {jobs} jobs that lack a value")?;
        }
        Ok(())
    }
}

impl Table {
    /// A row as formatted text.
    pub(crate) fn cells(&self, row: &Row) -> Vec<String> {
        let values = self.columns[1..].iter().zip(&row.cells);
        let shown = values.map(|(column, cell)| cell.map_or("-".into(), |v| column.unit.show(v)));
        std::iter::once(fitted(&row.name)).chain(shown).collect()
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Count => grouped(value as u64),
            Self::Share => percent(value),
            Self::Seconds => time(value),
            Self::Number | Self::Name => format!("{value:.2}"),
        }
    }
}

impl Study {
    /// One line for each value, and one for each table without values.
    pub fn csv(&self) -> String {
        let mut text = String::from("table,row,column,value\n");
        for table in &self.tables {
            for column in &table.missing {
                let _ = writeln!(text, "{},,missing,{}", table.id, quoted(column));
            }
            for row in &table.rows {
                let named = table.columns[1..].iter().zip(&row.cells);
                for (column, value) in named.filter_map(|(c, v)| v.map(|v| (c, v))) {
                    let _ =
                        writeln!(text, "{},{},{},{value}", table.id, quoted(&row.name), column.key);
                }
            }
        }
        text
    }
}

fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}
