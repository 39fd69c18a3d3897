//! Microsoft Philly (ATC 2019) as tables. The original JSON log is read in `philly_log`.

use super::csv::Header;
use super::error::Problem;
use super::field::Unit;
use super::layout::RowReader;
use super::{Status, TraceJob};

/// Calendar times are the cluster's wall clock without offset; the hour of a daylight-saving change
/// is not corrected, as the files do not say on which side of it a time lies.
pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    if header.has(&["gpu_num"]) { all_status(header) } else { completed(header) }
}

/// `philly_jobs.csv`: completed jobs without names, so they are numbered by row.
fn completed(header: &Header) -> Result<RowReader, Problem> {
    let [submit, duration, gpus] = header.require(["timestamp", "duration", "num_gpus"])?;
    let team = header.find("cluster");
    Ok(Box::new(move |row| {
        let submit_us = row.timestamp(submit)?;
        let duration_s = row.seconds(duration, Unit::Seconds)?;
        let mut job = TraceJob::new(row.index.to_string(), submit_us, row.gpus(gpus)?, duration_s);
        job.team = row.owned(team);
        Ok(Some(job))
    }))
}

/// The sample over all final states.
fn all_status(header: &Header) -> Result<RowReader, Problem> {
    let [id, submit, duration, gpus] =
        header.require(["job_id", "submit_time", "duration", "gpu_num"])?;
    let completed = header.find("in_completed_set");
    Ok(Box::new(move |row| {
        let submit_us = row.timestamp(submit)?;
        let duration_s = row.seconds(duration, Unit::Seconds)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, duration_s);
        // Any other value means killed or failed, without saying which.
        job.status = (row.text_of(completed) == Some("1")).then_some(Status::Passed);
        Ok(Some(job))
    }))
}
