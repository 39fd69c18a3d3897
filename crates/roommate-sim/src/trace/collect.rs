//! Collects the jobs of one file: checks that hold for every format, and the count of invalid rows.

use super::error::{Bad, Problem, TraceError};
use super::field::MAX_S;
use super::lines::Source;
use super::{Format, ReadOptions, Remark, Remarks, Trace, TraceJob};
use std::collections::HashSet;

/// Most dropped rows that are kept for the report.
const SHOWN_ROWS: usize = 5;

/// The jobs read so far.
pub(super) struct Collector {
    skip_bad_rows: bool,
    max_jobs: usize,
    jobs: Vec<TraceJob>,
    ids: HashSet<String>,
    dropped: u64,
    first_dropped: Vec<TraceError>,
    remarks: Remarks,
}

impl Collector {
    pub(super) fn new(options: &ReadOptions) -> Self {
        Self {
            skip_bad_rows: options.skip_bad_rows,
            max_jobs: options.max_jobs.unwrap_or(usize::MAX),
            jobs: Vec::new(),
            ids: HashSet::new(),
            dropped: 0,
            first_dropped: Vec::new(),
            remarks: Remarks::new(),
        }
    }

    /// Adds the result of one row (`None`: a job without GPUs). Returns whether to read on.
    pub(super) fn add(
        &mut self,
        source: &Source,
        line: u64,
        row: Result<Option<TraceJob>, Bad>,
    ) -> Result<bool, TraceError> {
        let checked = row.and_then(|job| match job {
            Some(job) => self.check(job).map(Some),
            None => Ok(None),
        });
        match checked {
            Ok(Some(job)) => self.jobs.push(job),
            Ok(None) => self.remark(Remark::NoGpu),
            Err(bad) => self.reject(source.error_at(line, bad))?,
        }
        Ok(self.jobs.len() < self.max_jobs)
    }

    /// Drops and counts an invalid row, or stops at it.
    pub(super) fn reject(&mut self, error: TraceError) -> Result<(), TraceError> {
        if !self.skip_bad_rows || !error.problem.is_row() {
            return Err(error);
        }
        self.dropped += 1;
        if self.first_dropped.len() < SHOWN_ROWS {
            self.first_dropped.push(error);
        }
        Ok(())
    }

    /// Whether invalid rows are dropped.
    pub(super) fn skips(&self) -> bool {
        self.skip_bad_rows
    }

    /// Counts something that is left out or changed.
    pub(super) fn remark(&mut self, remark: Remark) {
        self.remarks(remark, 1);
    }

    /// Counts several at once.
    pub(super) fn remarks(&mut self, remark: Remark, n: u64) {
        *self.remarks.entry(remark).or_default() += n;
    }

    fn check(&mut self, job: TraceJob) -> Result<TraceJob, Bad> {
        if job.id.trim().is_empty() {
            return Err(Problem::expected("a job id", &job.id).into());
        }
        // Written so that a NaN fails too.
        if !(job.work_s() <= MAX_S && job.duration_s <= MAX_S) {
            let found = format!("{} steps of {} s", job.steps, job.step_s);
            return Err(Problem::expected("at most 100 years of work", &found).into());
        }
        // The set costs one more copy of each id; it is freed at the end of the file.
        if !self.ids.insert(job.id.clone()) {
            return Err(Problem::Duplicate(super::error::shown(&job.id)).into());
        }
        Ok(job)
    }

    /// Builds the trace. Calendar times become relative to the earliest submission.
    pub(super) fn finish(mut self, format: Format) -> Trace {
        self.jobs.sort_by_key(|job| job.submit_us);
        let calendar =
            matches!(format, Format::Philly | Format::Helios | Format::Sacct | Format::Kube);
        let first = self.jobs.first().filter(|_| calendar).map(|job| job.submit_us);
        for job in &mut self.jobs {
            job.submit_us -= first.unwrap_or(0);
        }
        Trace {
            jobs: self.jobs,
            format,
            dropped: self.dropped,
            first_dropped: self.first_dropped,
            origin_s: first.map(|us| us / 1_000_000),
            remarks: self.remarks,
        }
    }
}
