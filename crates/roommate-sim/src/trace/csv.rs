//! Tables of one record per line: comma-separated with RFC 4180 quotes, or tab-separated without.

use super::error::{Bad, Problem, TraceError, shown};
use super::field::{self, Unit};
use super::lines::Source;

/// One record; its fields share one buffer, which is reused for the next record.
#[derive(Default)]
pub(super) struct Record {
    text: String,
    /// Start and end of each field in the buffer.
    fields: Vec<(usize, usize)>,
}

impl Record {
    pub(super) fn len(&self) -> usize {
        self.fields.len()
    }

    pub(super) fn get(&self, index: usize) -> &str {
        let (start, end) = self.fields[index];
        &self.text[start..end]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// Splits a line. Quotes are special only in comma-separated text: Gavel's command lines
    /// contain any character.
    pub(super) fn split(&mut self, line: &str, delimiter: char) -> Result<(), Problem> {
        self.text.clear();
        self.fields.clear();
        if delimiter != ',' || memchr::memchr(b'"', line.as_bytes()).is_none() {
            self.text.push_str(line);
            let mut start = 0;
            for end in memchr::memchr_iter(delimiter as u8, line.as_bytes()) {
                self.fields.push((start, end));
                start = end + 1;
            }
            self.fields.push((start, line.len()));
            return Ok(());
        }
        let mut rest = line;
        loop {
            let after = if let Some(quoted) = rest.strip_prefix('"') {
                self.push_quoted(quoted)?
            } else {
                let end = rest.find(delimiter).unwrap_or(rest.len());
                self.push(&rest[..end]);
                &rest[end..]
            };
            match after.strip_prefix(delimiter) {
                Some(next) => rest = next,
                None if after.is_empty() => return Ok(()),
                None => return Err(Problem::Quote("unexpected text after a closing quote")),
            }
        }
    }

    /// Joins the field at `index` and the `more` after it: a delimiter in it was no end of a field.
    pub(super) fn join(&mut self, index: usize, more: usize) {
        self.fields[index].1 = self.fields[index + more].1;
        self.fields.drain(index + 1..=index + more);
    }

    fn push(&mut self, field: &str) {
        let start = self.text.len();
        self.text.push_str(field);
        self.fields.push((start, self.text.len()));
    }

    /// Reads a field after its opening quote; returns the rest of the line after its closing quote.
    fn push_quoted<'a>(&mut self, mut rest: &'a str) -> Result<&'a str, Problem> {
        let start = self.text.len();
        loop {
            let Some(end) = rest.find('"') else {
                return Err(Problem::Quote("a quoted field is not closed on its line"));
            };
            self.text.push_str(&rest[..end]);
            rest = &rest[end + 1..];
            match rest.strip_prefix('"') {
                Some(more) => {
                    self.text.push('"');
                    rest = more;
                }
                None => break,
            }
        }
        self.fields.push((start, self.text.len()));
        Ok(rest)
    }
}

/// A column that was found in the header.
#[derive(Clone, Copy)]
pub(super) struct Column {
    index: usize,
    name: &'static str,
}

/// The names of a table's columns.
pub(super) struct Header {
    names: Vec<String>,
    /// The column whose text may contain the delimiter, where nothing is quoted.
    free: Option<usize>,
}

impl Header {
    pub(super) fn new(record: &Record) -> Self {
        Self { names: record.iter().map(|name| name.trim().to_owned()).collect(), free: None }
    }

    /// A header for files without one.
    pub(super) fn fixed(names: &[&str]) -> Self {
        Self { names: names.iter().map(|&n| n.to_owned()).collect(), free: None }
    }

    /// Takes the surplus fields of a row for parts of the text of this column.
    pub(super) fn with_free(mut self, name: &'static str) -> Self {
        self.free = self.find(name).map(|column| column.index);
        self
    }

    pub(super) fn has(&self, names: &[&str]) -> bool {
        names.iter().all(|name| self.names.iter().any(|n| n == name))
    }

    pub(super) fn find(&self, name: &'static str) -> Option<Column> {
        let index = self.names.iter().position(|n| n == name)?;
        Some(Column { index, name })
    }

    /// Finds the named columns; the error lists all missing ones at once.
    pub(super) fn require<const N: usize>(
        &self,
        names: [&'static str; N],
    ) -> Result<[Column; N], Problem> {
        let missing: Vec<String> =
            names.iter().filter(|n| !self.has(&[n])).map(|n| format!("{n:?}")).collect();
        if !missing.is_empty() {
            let plural = if missing.len() == 1 { "" } else { "s" };
            return Err(Problem::Columns(format!(
                "missing column{plural} {}; expected {}, found {}",
                missing.join(", "),
                names.join(", "),
                self.shown(),
            )));
        }
        Ok(names.map(|name| self.find(name).expect("checked above that none is missing")))
    }

    pub(super) fn shown(&self) -> String {
        // A wrong file may have any number of columns.
        let mut names: Vec<String> = self.names.iter().take(20).map(|n| shown(n)).collect();
        if self.names.len() > names.len() {
            names.push("…".to_owned());
        }
        names.join(", ")
    }
}

/// One row of a table under its header.
pub(super) struct Row<'a> {
    record: &'a Record,
    /// Number of rows before this one.
    pub(super) index: u64,
}

impl Row<'_> {
    pub(super) fn text(&self, column: Column) -> &str {
        self.record.get(column.index)
    }

    /// The text of a column that may be absent; empty counts as absent.
    pub(super) fn text_of(&self, column: Option<Column>) -> Option<&str> {
        column.map(|c| self.text(c)).filter(|text| !text.is_empty())
    }

    pub(super) fn owned(&self, column: Option<Column>) -> Option<String> {
        self.text_of(column).map(str::to_owned)
    }

    pub(super) fn with<T>(
        &self,
        column: Column,
        parse: impl FnOnce(&str) -> Result<T, Problem>,
    ) -> Result<T, Bad> {
        parse(self.text(column)).map_err(|problem| Bad::at(column.name, problem))
    }

    /// Parses a number with the given check.
    pub(super) fn value<T>(
        &self,
        column: Column,
        rule: impl FnOnce(f64) -> Result<T, Problem>,
    ) -> Result<T, Bad> {
        self.with(column, |text| field::parse(text).and_then(rule))
    }

    pub(super) fn gpus(&self, column: Column) -> Result<u32, Bad> {
        self.value(column, field::gpus)
    }

    pub(super) fn whole(&self, column: Column) -> Result<u32, Bad> {
        self.value(column, |value| field::whole(value, u32::MAX))
    }

    pub(super) fn number(&self, column: Column) -> Result<f64, Bad> {
        self.value(column, field::number)
    }

    pub(super) fn seconds(&self, column: Column, unit: Unit) -> Result<f64, Bad> {
        self.value(column, |value| field::seconds(value, unit))
    }

    pub(super) fn micros(&self, column: Column, unit: Unit) -> Result<u64, Bad> {
        self.value(column, |value| field::micros(value, unit))
    }

    pub(super) fn timestamp(&self, column: Column) -> Result<u64, Bad> {
        self.with(column, field::timestamp_us)
    }

    pub(super) fn number_of(&self, column: Option<Column>) -> Result<Option<f64>, Bad> {
        match column {
            Some(c) if !self.text(c).trim().is_empty() => self.number(c).map(Some),
            _ => Ok(None),
        }
    }

    pub(super) fn bad(&self, column: Column, expected: &'static str) -> Bad {
        Bad::at(column.name, Problem::expected(expected, self.text(column)))
    }
}

/// Reads every row of a table: `each` gets the line number and the row (or the error of its line)
/// and returns whether to go on. The header, if the file has one, must already be read.
pub(super) fn rows(
    source: &mut Source,
    header: &Header,
    delimiter: char,
    mut each: impl FnMut(&Source, Result<&Row<'_>, Problem>) -> Result<bool, TraceError>,
) -> Result<(), TraceError> {
    let mut record = Record::default();
    let mut index = 0;
    while source.next_line()? {
        let split = source.text().and_then(|line| record.split(line, delimiter));
        let checked = split.and_then(|()| {
            let (expected, found) = (header.names.len(), record.len());
            if let Some(free) = header.free.filter(|_| found > expected) {
                record.join(free, found - expected);
                return Ok(());
            }
            if expected == found { Ok(()) } else { Err(Problem::FieldCount { expected, found }) }
        });
        let row = Row { record: &record, index };
        index += 1;
        if !each(source, checked.map(|()| &row))? {
            break;
        }
    }
    Ok(())
}

/// Reads the header line of a comma-separated table.
pub(super) fn header(source: &mut Source) -> Result<Header, TraceError> {
    header_by(source, ',')
}

/// Reads the header line.
pub(super) fn header_by(source: &mut Source, delimiter: char) -> Result<Header, TraceError> {
    let mut record = Record::default();
    if !source.next_line()? {
        return Err(source.whole_file(Problem::Empty));
    }
    let split = source.text().and_then(|line| record.split(line, delimiter));
    // Not a row that could be dropped: without the header no row can be read.
    split.map_err(|problem| source.error_here(Problem::Columns(problem.to_string())))?;
    Ok(Header::new(&record))
}
