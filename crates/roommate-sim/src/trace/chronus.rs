//! Chronus' traces (`SoCC` 2021): minutes, with deadlines. The rows are not in order of time.

use super::csv::{Column, Header, Row};
use super::error::{Bad, Problem};
use super::field::{self, Unit};
use super::layout::RowReader;
use super::{TraceClass, TraceJob};

/// Steps are seconds for the reason given in `tiresias`.
pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    let [id, team, gpus, submit, duration, times, values, kind] = header.require([
        "job_id",
        "user",
        "num_gpu",
        "submit_time",
        "duration",
        "expect_time_list",
        "expect_value_list",
        "job_type",
    ])?;
    let model = header.find("model_name");
    Ok(Box::new(move |row| {
        let submit_us = row.micros(submit, Unit::Minutes)?;
        let duration_s = row.seconds(duration, Unit::Minutes)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, duration_s);
        job.model = row.owned(model);
        // The column is called user, but its values are the virtual clusters of Philly.
        job.team = row.owned(Some(team));
        match row.text(kind) {
            "strict" | "soft" => set_deadlines(&mut job, row, times, values)?,
            // Its deadline column repeats the submission time and means nothing.
            "best" => job.class = TraceClass::BestEffort,
            _ => return Err(row.bad(kind, "strict, soft or best")),
        }
        Ok(Some(job))
    }))
}

/// Deadlines are relative to the submission and joined by `-`, like their values; the last one is
/// the hard deadline.
fn set_deadlines(
    job: &mut TraceJob,
    row: &Row<'_>,
    times: Column,
    values: Column,
) -> Result<(), Bad> {
    let after = row.with(times, |text| {
        let minutes = |part| field::parse(part).and_then(|v| field::micros(v, Unit::Minutes));
        text.split('-').map(minutes).collect::<Result<Vec<_>, _>>()
    })?;
    let worth = row.with(values, |text| {
        let value = |part| field::parse(part).and_then(field::number);
        text.split('-').map(value).collect::<Result<Vec<_>, _>>()
    })?;
    if after.len() != worth.len() {
        return Err(row.bad(values, "as many values as deadlines"));
    }
    if !after.is_sorted() {
        return Err(row.bad(times, "rising deadlines"));
    }
    let mut deadlines: Vec<(u64, f64)> =
        after.iter().map(|after| job.submit_us + after).zip(worth).collect();
    let last = deadlines.pop();
    job.deadline_us = last.map(|(at, _)| at);
    job.value = last.map(|(_, value)| value);
    job.soft_deadlines = deadlines;
    Ok(())
}
