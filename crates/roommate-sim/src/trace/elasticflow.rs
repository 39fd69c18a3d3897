//! `ElasticFlow`'s traces (ASPLOS 2023): seconds, with deadlines.

use super::TraceJob;
use super::csv::Header;
use super::error::Problem;
use super::field::Unit;
use super::layout::RowReader;

/// Steps are seconds for the reason given in `tiresias`. The deadline `ddl` is absolute; it may be
/// before `submit_time + duration`, since the original meets it by giving a job more GPUs than it
/// asked for.
pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    let [id, gpus, submit, duration, deadline] =
        header.require(["job_id", "num_gpu", "submit_time", "duration", "ddl"])?;
    let (model, batch) = (header.find("model_name"), header.find("batch_size"));
    Ok(Box::new(move |row| {
        let submit_us = row.micros(submit, Unit::Seconds)?;
        let duration_s = row.seconds(duration, Unit::Seconds)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, duration_s);
        job.deadline_us = Some(row.micros(deadline, Unit::Seconds)?);
        job.model = row.owned(model);
        job.batch = batch.map_or(Ok(0), |column| row.whole(column))?;
        Ok(Some(job))
    }))
}
