//! Tiresias' traces (NSDI 2019): seconds.

use super::TraceJob;
use super::csv::Header;
use super::error::Problem;
use super::field::Unit;
use super::layout::RowReader;

/// Steps are seconds here, not the `iterations` column: the original runs every job for its
/// `duration`, and `iterations × (duration / iterations)` would not recover that exactly.
pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    let [id, gpus, submit, duration] =
        header.require(["job_id", "num_gpu", "submit_time", "duration"])?;
    let model = header.find("model_name");
    Ok(Box::new(move |row| {
        let submit_us = row.micros(submit, Unit::Seconds)?;
        let duration_s = row.seconds(duration, Unit::Seconds)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, duration_s);
        job.model = row.owned(model);
        Ok(Some(job))
    }))
}
