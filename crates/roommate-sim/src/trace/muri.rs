//! Muri's traces (SIGCOMM 2022): milliseconds, with the stages of one iteration.

use super::csv::{Column, Header};
use super::error::{Bad, Problem};
use super::field::{self, Unit};
use super::layout::RowReader;
use super::{TraceClass, TraceJob};

pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    let [id, gpus, submit, iterations, model, batch, duration, step, data, gpu, network, priority] =
        header.require([
            "job_id",
            "num_gpu",
            "submit_time",
            "iterations",
            "model_name",
            "batch_size",
            "duration",
            "iteration_time",
            "resource_time_0",
            "resource_time_1",
            "resource_time_2",
            "priority",
        ])?;
    Ok(Box::new(move |row| {
        // The original reads durations as whole milliseconds; its results depend on that.
        let duration_s = row.value(duration, |ms| field::seconds(ms.trunc(), Unit::Millis))?;
        let submit_us = row.micros(submit, Unit::Millis)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, duration_s);
        job.steps = row.value(iterations, field::steps)?;
        // Without the factor 1.015 of the original simulator, which is a property of its cluster,
        // not of the jobs.
        job.step_s = row.value(step, |ms| field::positive_seconds(ms, Unit::Millis))?;
        job.model = row.owned(Some(model));
        job.batch = row.whole(batch)?;
        let stage = |column: Column| row.seconds(column, Unit::Millis);
        // Input and CPU work are measured as one; the original counts all of it as storage.
        job.stages_s = Some([stage(data)?, 0.0, stage(gpu)?, stage(network)?]);
        job.class = match row.text(priority).trim() {
            "0" => TraceClass::Guaranteed,
            "1" => TraceClass::BestEffort,
            _ => return Err::<_, Bad>(row.bad(priority, "0 or 1")),
        };
        Ok(Some(job))
    }))
}
