//! Slurm: what `sacct --parsable2` prints of a cluster's past. `docs/reference/trace-format.md` has
//! the command.
//!
//! A job has a row for itself, one for each of its steps, one more for each time that it was
//! requeued, and one for each component if it is heterogeneous. All of them become one job. Nothing
//! is quoted, so a `|` is allowed in the name of a job only.

use super::collect::Collector;
use super::csv::{self, Column, Header, Row};
use super::error::{Bad, Problem, TraceError};
use super::field::{self, Unit};
use super::lines::Source;
use super::{Observed, Remark, Status, TraceJob};
use std::collections::HashMap;

/// The column whose text may contain the delimiter.
const FREE: &str = "JobName";

/// Whether a first line is the header of `sacct --parsable2`.
pub(super) fn is_header(line: &str) -> bool {
    let has = |name: &str| line.split('|').any(|column| column.trim() == name);
    ["JobID", "State", "Submit"].into_iter().all(has)
}

/// Reads the table.
pub(super) fn read(source: &mut Source, collector: &mut Collector) -> Result<(), TraceError> {
    let header = csv::header_by(source, '|')?.with_free(FREE);
    let columns = Columns::new(&header).map_err(|problem| source.error_here(problem))?;
    let mut history = History::default();
    csv::rows(source, &header, '|', |source, row| {
        let line = source.line();
        match row.map_err(Bad::from).and_then(|row| columns.attempt(row, line)) {
            Ok(Some(attempt)) => history.add(attempt, collector),
            Ok(None) => collector.remark(Remark::Step),
            Err(bad) => collector.reject(source.error_at(line, bad))?,
        }
        Ok(true)
    })?;
    for record in history.records {
        let line = record.last.line;
        match record.job() {
            Ok((job, remark)) => {
                remark.into_iter().for_each(|remark| collector.remark(remark));
                if !collector.add(source, line, Ok(Some(job)))? {
                    break;
                }
            }
            Err(remark) => collector.remark(remark),
        }
    }
    Ok(())
}

/// The columns that are read.
struct Columns {
    id: Column,
    submit: Column,
    start: Column,
    state: Column,
    end: Option<Column>,
    elapsed_s: Option<Column>,
    elapsed: Option<Column>,
    allocated: Option<Column>,
    requested: Option<Column>,
    nodes: Option<Column>,
    user: Option<Column>,
    account: Option<Column>,
    name: Option<Column>,
}

impl Columns {
    fn new(header: &Header) -> Result<Self, Problem> {
        let [id, submit, start, state] = header.require(["JobID", "Submit", "Start", "State"])?;
        let columns = Self {
            id,
            submit,
            start,
            state,
            end: header.find("End"),
            elapsed_s: header.find("ElapsedRaw"),
            elapsed: header.find("Elapsed"),
            allocated: header.find("AllocTRES"),
            requested: header.find("ReqTRES"),
            nodes: header.find("NNodes"),
            user: header.find("User"),
            account: header.find("Account"),
            name: header.find(FREE),
        };
        let one_of = |found: bool, names: &str| {
            let problem = || Problem::Columns(format!("missing one of the columns {names}"));
            if found { Ok(()) } else { Err(problem()) }
        };
        one_of(columns.allocated.or(columns.requested).is_some(), "AllocTRES, ReqTRES")?;
        let lengths = columns.elapsed_s.or(columns.elapsed).or(columns.end);
        one_of(lengths.is_some(), "ElapsedRaw, Elapsed, End")?;
        Ok(columns)
    }

    /// What a row says of one attempt of a job; `None` for the row of a step.
    fn attempt(&self, row: &Row<'_>, line: u64) -> Result<Option<Attempt>, Bad> {
        let Id { job, component, step } =
            Id::parse(row.text(self.id)).map_err(|problem| Bad::at("JobID", problem))?;
        if step {
            return Ok(None);
        }
        let (id, state) = (job.to_owned(), row.with(self.state, State::parse)?);
        let submit_s = row.with(self.submit, time)?;
        let start_s = row.with(self.start, time)?;
        let end_s = self.end.map(|column| row.with(column, time)).transpose()?.flatten();
        let tres = |column: Option<Column>| {
            column.map(|c| row.with(c, Tres::parse)).transpose().map(Option::unwrap_or_default)
        };
        let (allocated, requested) = (tres(self.allocated)?, tres(self.requested)?);
        let tres = if allocated.gpus > 0 || allocated.parts { allocated } else { requested };
        let nodes = self.nodes.filter(|c| !row.text(*c).is_empty());
        let nodes = nodes.map(|c| row.with(c, |text| count(text, u32::MAX))).transpose()?;
        let passed = start_s.zip(end_s).map_or(0, |(start, end)| end.saturating_sub(start));
        Ok(Some(Attempt {
            id,
            component,
            line,
            state,
            submit_s,
            start_s,
            seconds: self.seconds(row)?.unwrap_or(passed),
            tres,
            nodes: nodes.unwrap_or(0),
            user: row.owned(self.user),
            account: row.owned(self.account),
            name: row.owned(self.name),
        }))
    }

    /// Seconds that it ran, from the columns that do not jump with the clock.
    fn seconds(&self, row: &Row<'_>) -> Result<Option<u64>, Bad> {
        if let Some(column) = self.elapsed_s.filter(|c| !row.text(*c).is_empty()) {
            return row.seconds(column, Unit::Seconds).map(|s| Some(s as u64));
        }
        let column = self.elapsed.filter(|c| !row.text(*c).is_empty());
        column.map(|c| row.with(c, elapsed)).transpose()
    }
}

/// The parts of a `JobID`: `17`, `17_3` of an array, `17_[4-9]` of an array that still waits,
/// `17+1` of a heterogeneous job, `17.batch` of a step.
struct Id<'a> {
    job: &'a str,
    component: u32,
    step: bool,
}

impl<'a> Id<'a> {
    fn parse(text: &'a str) -> Result<Self, Problem> {
        let wrong = || Problem::expected("a job id like 17, 17_3, 17+1 or 17.batch", text);
        let text = text.trim();
        if !text.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(wrong());
        }
        let (whole, step) = text.split_once('.').map_or((text, false), |(job, _)| (job, true));
        let (job, component) = match whole.split_once('+') {
            Some((job, part)) => (job, part.parse().map_err(|_| wrong())?),
            None => (whole, 0),
        };
        Ok(Self { job, component, step })
    }
}

/// How a job ended, from its state; `None` for a state that is not final.
pub(super) fn final_status(text: &str) -> Option<Status> {
    State::parse(text).ok().and_then(State::status)
}

/// What a state means for the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ended(Status),
    /// Ended by the cluster, which may start it again under the same number.
    Stopped,
    Runs,
    Waits,
}

impl State {
    /// The first word counts: `CANCELLED by 1000`.
    fn parse(text: &str) -> Result<Self, Problem> {
        let word = text.split([' ', '+']).next().unwrap_or_default();
        Ok(match word {
            "COMPLETED" => Self::Ended(Status::Passed),
            "CANCELLED" => Self::Ended(Status::Killed),
            "FAILED" | "TIMEOUT" | "OUT_OF_MEMORY" | "DEADLINE" | "LAUNCH_FAILED" | "EXPIRED" => {
                Self::Ended(Status::Failed)
            }
            "NODE_FAIL" | "BOOT_FAIL" | "PREEMPTED" | "REQUEUED" | "RECONFIG_FAIL" => Self::Stopped,
            "RUNNING" | "SUSPENDED" | "COMPLETING" | "RESIZING" | "STOPPED" | "SIGNALING"
            | "STAGE_OUT" | "UPDATE_DB" | "POWER_UP_NODE" => Self::Runs,
            "PENDING" | "CONFIGURING" | "REQUEUE_HOLD" | "REQUEUE_FED" | "RESV_DEL_HOLD"
            | "SPECIAL_EXIT" | "REVOKED" => Self::Waits,
            _ => return Err(Problem::expected("a state of Slurm like COMPLETED", text)),
        })
    }

    fn status(self) -> Option<Status> {
        match self {
            Self::Ended(status) => Some(status),
            Self::Stopped => Some(Status::Failed),
            Self::Runs | Self::Waits => None,
        }
    }
}

/// Trackable resources, `billing=32,cpu=32,gres/gpu:a100=4,gres/gpu=4,mem=250G,node=1`.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tres {
    /// Whole GPUs.
    gpus: u32,
    cpus: u32,
    /// GPU model, if there is one only.
    model: Option<String>,
    /// Whether it has a part of a GPU: a MIG slice, or a share by MPS or shard.
    parts: bool,
}

impl Tres {
    fn parse(text: &str) -> Result<Self, Problem> {
        let mut found = Self::default();
        let (mut total, mut slices, mut models) = (0, 0, Vec::new());
        for (name, amount) in text.split(',').filter_map(|part| part.split_once('=')) {
            match name.split_once(':').unwrap_or((name, "")) {
                ("cpu", _) => found.cpus = count(amount, u32::MAX)?,
                ("gres/gpu", "") => total = gpus(amount)?,
                ("gres/gpu", model) if is_slice(model) => slices += gpus(amount)?,
                ("gres/gpu", model) => models.push((model.to_ascii_lowercase(), gpus(amount)?)),
                ("gres/mps" | "gres/shard", _) => found.parts |= gpus(amount)? > 0,
                _ => {}
            }
        }
        models.retain(|(_, n)| *n > 0);
        let typed: u32 = models.iter().map(|(_, n)| n).sum();
        // The total has those of every model, where it is written at all.
        found.gpus = total.saturating_sub(slices).max(typed).min(field::MAX_GPUS);
        found.parts |= slices > 0;
        if let [(model, n)] = &models[..]
            && *n == found.gpus
        {
            found.model = Some(model.clone());
        }
        Ok(found)
    }
}

/// Whether a GPU model is a MIG slice: `1g.10gb`, `a100_3g.20gb`.
fn is_slice(model: &str) -> bool {
    let before = model.split_once("g.").map(|(before, _)| before);
    before.is_some_and(|text| text.ends_with(|c: char| c.is_ascii_digit()))
}

fn gpus(text: &str) -> Result<u32, Problem> {
    count(text, field::MAX_GPUS)
}

/// A whole number; without `--noconvert`, sacct writes 1000 as `1K`.
fn count(text: &str, most: u32) -> Result<u32, Problem> {
    let text = text.trim();
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1_000.0),
        None => (text, 1.0),
    };
    field::whole((field::parse(digits)? * unit).round(), most)
}

/// A time, in seconds since 1970: of the calendar, or as a number (`SLURM_TIME_FORMAT=%s`); `None`
/// where Slurm does not know it.
fn time(text: &str) -> Result<Option<u64>, Problem> {
    let text = text.trim();
    if matches!(text, "" | "Unknown" | "None" | "N/A" | "INVALID" | "0") {
        return Ok(None);
    }
    if text.bytes().all(|b| b.is_ascii_digit()) {
        return field::parse(text)
            .and_then(|s| field::micros(s, Unit::Seconds))
            .map(|us| Some(us / 1_000_000));
    }
    field::timestamp(text).map(Some)
}

/// `[days-]hours:minutes:seconds`, in seconds.
fn elapsed(text: &str) -> Result<u64, Problem> {
    let wrong = || Problem::expected("a time like 1-02:30:00", text);
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let clock = clock.split_once('.').map_or(clock, |(whole, _)| whole);
    let number = |text: &str| text.parse::<u32>().map(u64::from).map_err(|_| wrong());
    let parts = clock.split(':').map(number).collect::<Result<Vec<u64>, _>>()?;
    match parts[..] {
        [h, m, s] if m < 60 && s < 60 => Ok(number(days)? * 86_400 + h * 3_600 + m * 60 + s),
        [m, s] if s < 60 => Ok(m * 60 + s),
        _ => Err(wrong()),
    }
}

/// One row: an attempt of a job, or of a component of it.
struct Attempt {
    id: String,
    component: u32,
    line: u64,
    state: State,
    submit_s: Option<u64>,
    start_s: Option<u64>,
    seconds: u64,
    tres: Tres,
    nodes: u32,
    user: Option<String>,
    account: Option<String>,
    name: Option<String>,
}

impl Attempt {
    /// Whether it had GPUs. Slurm gives a start to a job that was cancelled while it waited.
    fn ran(&self) -> bool {
        let waits = matches!(self.state, State::Waits | State::Ended(Status::Killed));
        self.start_s.is_some() && (self.seconds > 0 || !waits)
    }
}

/// A job, joined from its rows.
struct Record {
    last: Attempt,
    /// Submission of the first attempt, its start, and the run time of all that have ended.
    submit_s: Option<u64>,
    start_s: Option<u64>,
    before_s: u64,
    runs: u32,
}

/// The jobs in the order of their first rows.
#[derive(Default)]
struct History {
    records: Vec<Record>,
    /// The last record of each number, and how many had it before.
    known: HashMap<String, (usize, u32)>,
}

impl History {
    fn add(&mut self, mut attempt: Attempt, collector: &mut Collector) {
        let Some((index, reused)) = self.known.get_mut(&attempt.id) else {
            self.known.insert(attempt.id.clone(), (self.records.len(), 1));
            self.records.push(Record::of(attempt));
            return;
        };
        let record = &mut self.records[*index];
        if attempt.component > 0 {
            record.add_component(&attempt);
        } else if record.last.state == State::Stopped {
            collector.remark(Remark::Requeued);
            record.add_attempt(attempt);
        } else {
            *reused += 1;
            collector.remark(Remark::ReusedId);
            *index = self.records.len();
            attempt.id = format!("{}@{reused}", attempt.id);
            self.records.push(Record::of(attempt));
        }
    }
}

impl Record {
    fn of(attempt: Attempt) -> Self {
        let (submit_s, runs) = (attempt.submit_s, u32::from(attempt.ran()));
        let start_s = attempt.start_s.filter(|_| attempt.ran());
        Self { last: attempt, submit_s, start_s, before_s: 0, runs }
    }

    /// A requeued job begins again; Slurm also resets its submission.
    fn add_attempt(&mut self, next: Attempt) {
        self.before_s += self.last.seconds;
        self.runs += u32::from(next.ran());
        self.start_s = self.start_s.or(next.start_s.filter(|_| next.ran()));
        self.last = next;
    }

    /// The components of a heterogeneous job run at the same time, so they are one gang.
    fn add_component(&mut self, part: &Attempt) {
        let (last, own) = (&mut self.last, &part.tres);
        if last.tres.gpus == 0 {
            last.tres.model.clone_from(&own.model);
        } else if own.gpus > 0 && last.tres.model != own.model {
            last.tres.model = None;
        }
        last.tres.gpus = last.tres.gpus.saturating_add(own.gpus).min(field::MAX_GPUS);
        last.tres.cpus = last.tres.cpus.saturating_add(own.cpus);
        last.tres.parts |= own.parts;
        last.nodes = last.nodes.saturating_add(part.nodes);
        last.seconds = last.seconds.max(part.seconds);
    }

    /// The job, and what is to be told of it; or why it is none.
    fn job(self) -> Result<(TraceJob, Option<Remark>), Remark> {
        let Self { last, submit_s, start_s, before_s, runs } = self;
        let gpus = last.tres.gpus;
        if gpus == 0 {
            return Err(if last.tres.parts { Remark::PartOfGpu } else { Remark::NoGpu });
        }
        let (Some(submit_s), Some(start_s)) = (submit_s, start_s) else {
            return Err(Remark::NeverStarted);
        };
        let seconds = (before_s + last.seconds) as f64;
        let mut job = TraceJob::new(last.id, submit_s * 1_000_000, gpus, seconds);
        job.status = last.state.status();
        // A start before the submission is a clock that was set back: the wait is not known.
        job.queue_s = start_s.checked_sub(submit_s).map(|s| s as f64);
        job.attempts = runs;
        job.cpu_milli = (f64::from(last.tres.cpus) * 1000.0 / f64::from(gpus)) as u32;
        job.gpu_models.extend(last.tres.model);
        job.observed = Observed { machines: last.nodes, ..Observed::default() }.boxed();
        (job.team, job.user, job.model) = (last.account, last.user, last.name);
        let still = matches!(last.state, State::Runs).then_some(Remark::StillRan);
        Ok((job, still))
    }
}

#[cfg(test)]
mod tests;
