//! Errors of trace files, with file, line and column.

use super::Format;
use std::borrow::Cow;
use std::path::Path;

/// A trace (or a table that belongs to it) could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("could not read {what} {path:?}: {}{problem}", self.place())]
pub struct TraceError {
    /// Kind of file for the message, such as `trace` or `throughput table`.
    pub what: &'static str,
    /// Path of the file as given by the caller.
    pub path: Box<Path>,
    /// Line of the file, counted from 1; `None` for an error of the whole file.
    pub line: Option<u64>,
    /// Column (or JSON key) with the error, if it is known.
    pub column: Option<&'static str>,
    /// The error itself.
    pub problem: Problem,
}

/// An error of a trace file, without its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// An error of the operating system.
    #[error("{0}")]
    Io(String),
    /// The file has only white space.
    #[error("the file is empty")]
    Empty,
    /// The gzip stream is truncated.
    #[error("the gzip data ends early, so the file is not complete")]
    Truncated,
    /// The gzip stream does not decode.
    #[error("broken gzip data ({0})")]
    Gzip(String),
    /// The line exceeds the limit that bounds memory use.
    #[error("the line is longer than {limit_kib} KiB")]
    LongLine {
        /// The limit in KiB.
        limit_kib: usize,
    },
    /// The JSON object exceeds the limit that bounds memory use.
    #[error("the JSON object is longer than {limit_kib} KiB")]
    LongObject {
        /// The limit in KiB.
        limit_kib: usize,
    },
    /// The header lacks columns.
    #[error("{0}")]
    Columns(String),
    /// The first line belongs to no known format.
    #[error("unknown trace format, first line {0}")]
    Layout(String),
    /// Jobs are given in steps, and no throughput table gives the step time.
    #[error("the jobs have step counts but no durations, and no throughput table was given")]
    NoThroughputs,
    /// Jobs are given in iterations of models, and no table gives the iteration time.
    #[error("the jobs have iterations of models, and no table of models was given")]
    NoModels,
    /// The throughput table does not have the GPU model.
    #[error("no throughputs for GPU model {kind:?}; the table has {known}")]
    NoGpuModel {
        /// The requested GPU model.
        kind: String,
        /// The GPU models of the table.
        known: String,
    },
    /// The JSON around the jobs is invalid, so no later job can be found.
    #[error("broken JSON: {0}")]
    JsonFile(String),
    /// One JSON object is invalid or lacks a key.
    #[error("broken job: {0}")]
    Json(String),
    /// The row has more or fewer fields than the header.
    #[error("expected {expected} fields, found {found}")]
    FieldCount {
        /// Number of fields of the header.
        expected: usize,
        /// Number of fields of the row.
        found: usize,
    },
    /// A value that is invalid in its column.
    #[error("expected {expected}, found {found:?}")]
    Expected {
        /// Description of valid values.
        expected: Cow<'static, str>,
        /// The start of the value found.
        found: String,
    },
    /// The line is not UTF-8.
    #[error("not valid UTF-8")]
    Utf8,
    /// A quote that violates the CSV rules.
    #[error("{0}")]
    Quote(&'static str),
    /// Two jobs have the same id.
    #[error("duplicate job id {0:?}")]
    Duplicate(String),
    /// The throughput table lacks this job type.
    #[error("no throughput for {0}")]
    NoThroughput(String),
}

/// Longest piece of a file, in characters, that an error message repeats.
const SHOWN: usize = 60;

/// The start of `text`, short enough for a message.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl Problem {
    pub(super) fn expected(expected: impl Into<Cow<'static, str>>, found: &str) -> Self {
        Self::Expected { expected: expected.into(), found: shown(found) }
    }

    /// Whether only one row is invalid, so that reading can continue after it.
    pub fn is_row(&self) -> bool {
        matches!(
            self,
            Self::Json(_)
                | Self::FieldCount { .. }
                | Self::Expected { .. }
                | Self::Utf8
                | Self::Quote(_)
                | Self::Duplicate(_)
                | Self::NoThroughput(_)
        )
    }
}

impl TraceError {
    fn place(&self) -> String {
        match (self.line, self.column) {
            (None, None) => String::new(),
            (Some(line), None) => format!("line {line}: "),
            (Some(line), Some(column)) => format!("line {line}, column {column:?}: "),
            (None, Some(column)) => format!("column {column:?}: "),
        }
    }

    /// A remedy for the error, where one is known.
    pub fn hint(&self) -> Option<String> {
        let hint = match &self.problem {
            Problem::NoThroughput(_) => {
                "pass a table that has it, or --skip-bad-rows to drop such rows and count them"
            }
            // A table that belongs to a trace is read completely or not at all.
            problem if problem.is_row() && self.what == "trace" => {
                "pass --skip-bad-rows to drop such rows and count them"
            }
            Problem::Layout(_) | Problem::Columns(_) if self.what == "trace" => {
                let names: Vec<&str> = Format::ALL[1..].iter().map(|f| f.name()).collect();
                let own = "the columns of the roommate format are id, submit_s, gpus, duration_s";
                return Some(format!("pass --format with one of {}; {own}", names.join(", ")));
            }
            Problem::NoThroughputs => {
                "pass --throughputs with a CSV of columns gpu, job_type, scale_factor, steps_per_s"
            }
            Problem::NoModels => {
                "pass --throughputs with a CSV of columns model, iter_time_s, best_cpus_per_gpu, \
                 best_mem_gb_per_gpu, speedup"
            }
            Problem::NoGpuModel { .. } => "pass --gpu-model with one of these",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// An invalid row, before file and line are known.
#[derive(Debug)]
pub(super) struct Bad {
    pub(super) column: Option<&'static str>,
    pub(super) problem: Problem,
}

impl Bad {
    pub(super) fn at(column: &'static str, problem: Problem) -> Self {
        Self { column: Some(column), problem }
    }
}

impl From<Problem> for Bad {
    fn from(problem: Problem) -> Self {
        Self { column: None, problem }
    }
}
