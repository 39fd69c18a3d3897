//! Detects the format of a file and selects its reader.

use super::collect::Collector;
use super::csv::{self, Header, Record, Row};
use super::error::{Bad, Problem, TraceError, shown};
use super::lines::Source;
use super::{
    Format, ReadOptions, Trace, TraceJob, chronus, elasticflow, gavel, helios, kube, muri, native,
    pai, philly, philly_log, sacct, synergy, tiresias,
};
use std::path::Path;

/// Turns rows of one format into jobs; `None` is a job without GPUs.
pub(super) type RowReader = Box<dyn FnMut(&Row<'_>) -> Result<Option<TraceJob>, Bad>>;

pub(super) fn read(path: &Path, options: &ReadOptions) -> Result<Trace, TraceError> {
    let mut source = Source::open(path, "trace")?;
    let mut collector = Collector::new(options);
    let mut format = options.format;
    if source.first_byte() == b'[' && matches!(format, Format::Auto | Format::Philly) {
        philly_log::read(&mut source, &mut collector)?;
        return Ok(collector.finish(Format::Philly));
    }
    let is_kube = source.first_byte() == b'{' && kube::is_start(source.chunk()?);
    if format == Format::Kube || (format == Format::Auto && is_kube) {
        kube::read(&mut source, &mut collector)?;
        return Ok(collector.finish(Format::Kube));
    }
    if source.first_byte() == b'{' && matches!(format, Format::Auto | Format::Roommate) {
        native::read_jsonl(&mut source, &mut collector)?;
        return Ok(collector.finish(Format::Roommate));
    }
    let first = first_line(&mut source)?;
    if format == Format::Auto {
        format = sniff(&first).ok_or_else(|| {
            source.whole_file(Problem::Layout(format!("{:?}", shown(&first.line))))
        })?;
    }
    if format == Format::Sacct {
        sacct::read(&mut source, &mut collector)?;
        return Ok(collector.finish(format));
    }
    let (header, delimiter) = match headerless(format, &first) {
        Some(headerless) => headerless,
        None => (csv::header(&mut source)?, ','),
    };
    let mut to_job = rows_of(format, &header, options).map_err(|problem| match problem {
        Wrong::Here(problem) => source.error_here(problem),
        Wrong::File(problem) => source.whole_file(problem),
        Wrong::Elsewhere(error) => error,
    })?;
    csv::rows(&mut source, &header, delimiter, |source, row| {
        let job = row.map_err(Bad::from).and_then(&mut to_job);
        collector.add(source, source.line(), job)
    })?;
    Ok(collector.finish(format))
}

/// Reason a table cannot be read at all.
pub(super) enum Wrong {
    /// The header is invalid.
    Here(Problem),
    /// An additional input is missing; no line of the file is at fault.
    File(Problem),
    /// Another file is invalid.
    Elsewhere(TraceError),
}

impl From<Problem> for Wrong {
    fn from(problem: Problem) -> Self {
        Self::Here(problem)
    }
}

fn rows_of(format: Format, header: &Header, options: &ReadOptions) -> Result<RowReader, Wrong> {
    Ok(match format {
        Format::Auto | Format::Sacct | Format::Kube => {
            unreachable!("the caller has read, or detected, these formats")
        }
        Format::Roommate => native::rows(header)?,
        Format::Philly => philly::rows(header)?,
        Format::Helios => helios::rows(header)?,
        Format::Pai => pai::rows(header)?,
        Format::Muri => muri::rows(header)?,
        Format::Gavel => gavel::rows(header, options)?,
        Format::Chronus => chronus::rows(header)?,
        Format::Tiresias => tiresias::rows(header)?,
        Format::ElasticFlow => elasticflow::rows(header)?,
        Format::Synergy => synergy::rows(header, options)?,
    })
}

/// The first line, read before the format is known.
struct FirstLine {
    line: String,
    record: Record,
    tabs: usize,
}

fn first_line(source: &mut Source) -> Result<FirstLine, TraceError> {
    if !source.next_line()? {
        return Err(source.whole_file(Problem::Empty));
    }
    // The first line cannot be dropped as a bad row: it determines the format.
    let text = source.text();
    let line = text.map_err(|p| source.error_here(Problem::Layout(format!("is {p}"))))?.to_owned();
    source.hold();
    let mut record = Record::default();
    // The reader reports a broken quote; here it only means "not recognised".
    if record.split(&line, ',').is_err() {
        record = Record::default();
    }
    let tabs = line.matches('\t').count();
    Ok(FirstLine { line, record, tabs })
}

/// Columns and delimiter of a file without header line.
fn headerless(format: Format, first: &FirstLine) -> Option<(Header, char)> {
    match format {
        Format::Gavel => gavel::headerless(first.tabs + 1).map(|names| (names, '\t')),
        Format::Pai if pai::is_headerless(&first.record) => {
            Some((Header::fixed(&pai::TASK_TABLE), ','))
        }
        _ => None,
    }
}

fn sniff(first: &FirstLine) -> Option<Format> {
    // The first entry whose columns are all present wins; a format precedes those whose columns it
    // contains.
    const MARKS: [(&[&str], Format); 12] = [
        (&["id", "submit_s", "gpus", "duration_s"], Format::Roommate),
        (&["timestamp", "duration", "num_gpus"], Format::Philly),
        (&["submit_time", "gpu_num", "in_completed_set"], Format::Philly),
        (&["job_id", "submit_time", "gpu_num", "duration"], Format::Helios),
        (&["job_name", "task_name", "gpus_ceil"], Format::Pai),
        (&["job_name", "task_name", "plan_gpu"], Format::Pai),
        (&["num_gpu", "iteration_time", "resource_time_0"], Format::Muri),
        (&["job_type", "total_steps", "scale_factor"], Format::Gavel),
        (&["num_gpu", "submit_time", "expect_time_list"], Format::Chronus),
        (&["num_gpu", "submit_time", "ddl", "duration"], Format::ElasticFlow),
        (&["num_gpu", "submit_time", "iterations", "duration"], Format::Tiresias),
        (&["job_id", "model", "arrival_s", "iterations", "gpus"], Format::Synergy),
    ];
    if sacct::is_header(&first.line) {
        return Some(Format::Sacct);
    }
    let header = Header::new(&first.record);
    if let Some((_, format)) = MARKS.iter().find(|(names, _)| header.has(names)) {
        return Some(*format);
    }
    if gavel::headerless(first.tabs + 1).is_some() {
        return Some(Format::Gavel);
    }
    pai::is_headerless(&first.record).then_some(Format::Pai)
}
