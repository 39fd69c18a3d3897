//! Alibaba PAI 2020 (NSDI 2022): the task sample and the original `pai_task_table`, which has no
//! header.

use super::csv::{Header, Record, Row};
use super::error::{Bad, Problem};
use super::field::{self, Unit};
use super::layout::RowReader;
use super::{Status, TraceJob};
use std::collections::HashMap;

/// Columns of the original table, from its separate header file.
pub(super) const TASK_TABLE: [&str; 10] = [
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
];

/// Whether the first line is a task rather than the column names.
pub(super) fn is_headerless(first: &Record) -> bool {
    const STATES: [&str; 4] = ["Terminated", "Failed", "Running", "Waiting"];
    first.len() == TASK_TABLE.len() && STATES.contains(&first.get(3))
}

/// The start time stands for the submission time, which the trace does not have.
pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    if header.has(&["plan_gpu"]) { task_table(header) } else { sample(header) }
}

fn sample(header: &Header) -> Result<RowReader, Problem> {
    let [job_name, task, start, duration, gpus] =
        header.require(["job_name", "task_name", "start_time", "duration", "gpus_ceil"])?;
    let mut names = Names::default();
    Ok(Box::new(move |row| {
        let submit_us = row.micros(start, Unit::Seconds)?;
        let duration_s = row.seconds(duration, Unit::Seconds)?;
        let gpus = row.gpus(gpus)?;
        let id = names.unique(row.text(job_name), row.text(task));
        Ok(Some(TraceJob::new(id, submit_us, gpus, duration_s)))
    }))
}

fn task_table(header: &Header) -> Result<RowReader, Problem> {
    let [job_name, task, instances, status, start, end, gpu] = header.require([
        "job_name",
        "task_name",
        "inst_num",
        "status",
        "start_time",
        "end_time",
        "plan_gpu",
    ])?;
    let (cpu, kind) = (header.find("plan_cpu"), header.find("gpu_type"));
    let mut names = Names::default();
    Ok(Box::new(move |row| {
        let percent = row.number_of(Some(gpu))?.unwrap_or(0.0);
        if percent == 0.0 {
            return Ok(None);
        }
        let instances = row.gpus(instances)?;
        // In GPUs; most tasks ask for a fraction of one.
        let asked = f64::from(instances) * percent / 100.0;
        let gpus = asked.ceil();
        if gpus > f64::from(field::MAX_GPUS) {
            return Err(row.bad(gpu, "at most 65535 GPUs over all instances"));
        }
        let submit_us = row.micros(start, Unit::Seconds)?;
        let end_us = row.micros(end, Unit::Seconds)?;
        let Some(run_us) = end_us.checked_sub(submit_us) else {
            return Err(row.bad(end, "an end not before the start"));
        };
        let status = match row.text(status) {
            "Terminated" => Status::Passed,
            "Failed" => Status::Failed,
            _ => return Err(row.bad(status, "Terminated or Failed")),
        };
        let id = names.unique(row.text(job_name), row.text(task));
        let mut job = TraceJob::new(id, submit_us, gpus as u32, run_us as f64 / 1e6);
        job.status = Some(status);
        job.gpu_milli = ((asked * 1000.0 / gpus).round() as u32).max(1);
        // `plan_cpu` is in percent of a core, per instance.
        let cpu = row.number_of(cpu)?.unwrap_or(0.0);
        job.cpu_milli = (cpu * 10.0 * f64::from(instances) / gpus) as u32;
        job.gpu_models = kinds(row, kind);
        Ok::<_, Bad>(Some(job))
    }))
}

fn kinds(row: &Row<'_>, kind: Option<super::csv::Column>) -> Vec<String> {
    row.owned(kind).into_iter().collect()
}

/// Gives tasks of one job with the same name distinct ids; the second becomes `job/task#2`.
#[derive(Default)]
struct Names {
    seen: HashMap<String, u32>,
}

impl Names {
    fn unique(&mut self, job: &str, task: &str) -> String {
        let name = format!("{job}/{task}");
        let count = self.seen.entry(name.clone()).or_insert(0);
        *count += 1;
        if *count == 1 { name } else { format!("{name}#{count}") }
    }
}
