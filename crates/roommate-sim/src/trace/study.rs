//! The tables of the Philly study (Jeon et al., USENIX ATC 2019) from any trace that has the
//! columns.
//!
//! This file has the type of the tables and their construction; `tables` defines the tables,
//! `causes` attributes queueing delays, `render` writes text. A table that a trace cannot answer
//! lists the missing columns.

mod causes;
mod render;
mod tables;

use super::stats::CLASSES;
use super::{Format, Trace, TraceJob};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::BTreeMap;
use std::ops::Deref;

/// GPU quota of each team, by its name.
pub type Quotas = BTreeMap<String, u32>;

/// The study of one trace.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Study {
    /// The format it was read from.
    pub format: Format,
    /// Number of jobs.
    pub jobs: u64,
    /// Work of all jobs in GPU-hours.
    pub gpu_hours: f64,
    /// All tables, with or without rows.
    pub tables: Vec<Table>,
}

/// One table.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Short name.
    pub id: &'static str,
    /// Title.
    pub title: &'static str,
    /// The name column of the rows, then the value columns.
    pub columns: Vec<Column>,
    /// Rows; empty where columns of the trace are missing.
    pub rows: Vec<Row>,
    /// Columns that the trace would need.
    pub missing: Vec<&'static str>,
    /// Number of jobs without a value in one of the needed columns.
    pub left_out: u64,
}

/// A column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Name in JSON and CSV.
    pub key: &'static str,
    /// Heading in text.
    pub head: &'static str,
    /// Unit of its values.
    pub unit: Unit,
}

/// Unit of a column's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Names of the rows.
    Name,
    /// A number of things.
    Count,
    /// A share, 0 to 1.
    Share,
    /// Seconds.
    Seconds,
    /// A number without unit.
    Number,
}

/// A row of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The group of jobs it describes.
    pub name: String,
    /// A value for each column but the first; `None` where there is nothing to measure.
    pub cells: Vec<Option<f64>>,
}

impl Study {
    /// Finds a table by its short name.
    pub fn table(&self, id: &str) -> Option<&Table> {
        self.tables.iter().find(|table| table.id == id)
    }
}

impl Table {
    /// The value in this row and column.
    pub fn value(&self, row: &str, key: &str) -> Option<f64> {
        let column = self.columns.iter().position(|column| column.key == key)?;
        let row = self.rows.iter().find(|r| r.name == row)?;
        row.cells.get(column.checked_sub(1)?).copied().flatten()
    }
}

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("id", self.id)?;
        map.serialize_entry("title", self.title)?;
        if self.missing.is_empty() {
            map.serialize_entry("left_out", &self.left_out)?;
            let rows: Vec<Named<'_>> = self.rows.iter().map(|row| Named(self, row)).collect();
            map.serialize_entry("rows", &rows)?;
        } else {
            map.serialize_entry("missing", &self.missing)?;
        }
        map.end()
    }
}

/// A row with the keys of its table, for serialization.
struct Named<'a>(&'a Table, &'a Row);

impl Serialize for Named<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let (first, rest) = self.0.columns.split_first().expect("a table has columns");
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(first.key, &self.1.name)?;
        for (column, cell) in rest.iter().zip(&self.1.cells) {
            map.serialize_entry(column.key, cell)?;
        }
        map.end()
    }
}

/// Studies a trace. With the quotas of its teams, delays that the trace does not attribute are
/// attributed by reconstructing each team's GPU usage over time.
pub fn study(trace: &Trace, quotas: &Quotas) -> Study {
    let fair = causes::fair_share(&trace.jobs, quotas);
    let cases: Vec<Case<'_>> =
        trace.jobs.iter().zip(fair).map(|(job, fair_s)| Case { job, fair_s }).collect();
    Study {
        format: trace.format,
        jobs: cases.len() as u64,
        gpu_hours: cases.iter().map(Case::gpu_s).sum::<f64>() / 3_600.0,
        tables: tables::all(&cases),
    }
}

/// The size classes of the study with the jobs of each, without empty ones.
pub fn by_class(jobs: &[TraceJob]) -> Vec<(&'static str, Vec<&TraceJob>)> {
    let mut above = 0;
    let mut classes = Vec::new();
    for (name, largest) in CLASSES {
        let inside = |job: &&TraceJob| job.gpus > above && job.gpus <= largest;
        let inside: Vec<&TraceJob> = jobs.iter().filter(inside).collect();
        above = largest;
        if !inside.is_empty() {
            classes.push((name, inside));
        }
    }
    classes
}

/// A job, and the part of its queueing that is attributed to its team's quota, where known.
#[derive(Clone, Copy)]
struct Case<'a> {
    job: &'a TraceJob,
    fair_s: Option<f64>,
}

impl Deref for Case<'_> {
    type Target = TraceJob;
    fn deref(&self) -> &TraceJob {
        self.job
    }
}

impl Case<'_> {
    fn gpu_s(&self) -> f64 {
        super::stats::gpu_s(self.job)
    }
}

/// A column of the trace that a table needs.
struct Need {
    column: &'static str,
    has: fn(&Case<'_>) -> bool,
}

/// A name and its jobs, which become a row.
type Group<'a> = (String, Vec<Case<'a>>);

/// The value of a group of jobs; `None` where the jobs lack the data.
type Outcome = dyn Fn(&[Case<'_>]) -> Option<f64>;

/// The definition of a column: its name, and its value for the jobs of a row.
struct Figure {
    column: Column,
    of: Box<Outcome>,
}

fn figure(
    key: &'static str,
    head: &'static str,
    unit: Unit,
    of: impl Fn(&[Case<'_>]) -> Option<f64> + 'static,
) -> Figure {
    Figure { column: Column { key, head, unit }, of: Box::new(of) }
}

/// Names of a table and of its rows.
struct About {
    id: &'static str,
    title: &'static str,
    rows: Column,
    needs: &'static [Need],
}

impl About {
    /// The table over the jobs that have the needed columns, or the names of columns that no job
    /// has.
    fn table<'a>(
        self,
        all: &[Case<'a>],
        groups: impl FnOnce(&[Case<'a>]) -> Vec<Group<'a>>,
        figures: impl FnOnce(&[Case<'a>]) -> Vec<Figure>,
    ) -> Table {
        let known: Vec<Case<'a>> =
            all.iter().filter(|case| self.needs.iter().all(|n| (n.has)(case))).copied().collect();
        let absent = |need: &&Need| known.is_empty() && !all.iter().any(need.has);
        let mut missing: Vec<&str> = self.needs.iter().filter(absent).map(|n| n.column).collect();
        if known.is_empty() && missing.is_empty() {
            // Each column occurs, but no job has all of them.
            missing = self.needs.iter().map(|n| n.column).collect();
        }
        let figures = figures(&known);
        let row = |(name, jobs): Group<'a>| Row {
            name,
            cells: figures.iter().map(|figure| (figure.of)(&jobs)).collect(),
        };
        Table {
            id: self.id,
            title: self.title,
            columns: [self.rows].into_iter().chain(figures.iter().map(|f| f.column)).collect(),
            rows: if missing.is_empty() {
                groups(&known).into_iter().map(row).collect()
            } else {
                Vec::new()
            },
            missing,
            left_out: (all.len() - known.len()) as u64,
        }
    }
}

#[cfg(test)]
mod tests;
