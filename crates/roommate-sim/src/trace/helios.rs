//! `SenseTime` Helios (SC 2021): the Venus sample and the original `cluster_log.csv` of
//! `HeliosData`.

use super::csv::{Column, Header, Row};
use super::error::{Bad, Problem};
use super::field::{self, Unit};
use super::layout::RowReader;
use super::{Status, TraceJob, sacct};

pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    let [id, submit, gpus, duration] =
        header.require(["job_id", "submit_time", "gpu_num", "duration"])?;
    let (user, team) = (header.find("user"), header.find("vc"));
    let (cpus, state, queue) = (header.find("cpu_num"), header.find("state"), header.find("queue"));
    Ok(Box::new(move |row| {
        // Half of the original's jobs use no GPU; they are valid, but out of scope.
        if row.value(gpus, |count| field::whole(count, field::MAX_GPUS))? == 0 {
            return Ok(None);
        }
        let submit_us = row.timestamp(submit)?;
        let duration_s = row.seconds(duration, Unit::Seconds)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, duration_s);
        job.user = row.owned(user);
        job.team = row.owned(team);
        if let Some(queue) = queue.filter(|column| !row.text(*column).is_empty()) {
            job.queue_s = Some(row.seconds(queue, Unit::Seconds)?);
        }
        if let Some(cpus) = row.number_of(cpus)? {
            job.cpu_milli = (cpus * 1000.0 / f64::from(job.gpus)) as u32;
        }
        job.status = state.map(|column| status(row, column)).transpose()?;
        Ok(Some(job))
    }))
}

/// Final job states of Slurm.
fn status(row: &Row<'_>, column: Column) -> Result<Status, Bad> {
    sacct::final_status(row.text(column))
        .ok_or_else(|| row.bad(column, "a final Slurm state like COMPLETED, CANCELLED or FAILED"))
}
