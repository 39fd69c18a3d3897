//! Roommate's own trace format: CSV with columns by name, or the same keys as JSON lines.
//!
//! Required are `id`, `submit_s`, `gpus` and `duration_s`. Everything else of [`TraceJob`] is
//! optional, and a written trace reads back exactly: decimals are the shortest that give the same
//! double.

use super::collect::Collector;
use super::csv::{Column, Header, Row};
use super::error::{Bad, Problem, TraceError};
use super::field::{self, Unit};
use super::layout::RowReader;
use super::lines::Source;
use super::{Observed, Status, TraceClass, TraceJob, TraceService};
use crate::serving::requests::Bursts;
use roommate_core::job::GUARANTEED_SLOWDOWN;
use roommate_core::performance::goodput::{LrRule, Noise, Training};
use serde::{Deserialize, Serialize, Serializer};
use std::io::{self, Write};
use std::str::FromStr;

/// One job as written in the file: times in seconds, `None` for absent values.
#[derive(Default, Serialize, Deserialize)]
struct Raw {
    id: String,
    #[serde(serialize_with = "plain")]
    submit_s: f64,
    #[serde(serialize_with = "plain")]
    gpus: f64,
    #[serde(serialize_with = "plain")]
    duration_s: f64,
    #[serde(flatten)]
    more: Optional,
}

/// Writes whole numbers without `.0`.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for this signature")]
fn plain<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    if value.fract() == 0.0 && *value < 1e15 {
        to.serialize_u64(*value as u64)
    } else {
        to.serialize_f64(*value)
    }
}

#[expect(clippy::ref_option, reason = "serde asks for this signature")]
fn plain_some<S: Serializer>(value: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
    plain(&value.unwrap_or_default(), to)
}

/// Declares the optional columns once, for the struct, for both readers and for both writers.
macro_rules! optional {
    (numbers: $($number:ident),+; texts: $($text:ident),+;) => {
        #[derive(Default, Serialize, Deserialize)]
        struct Optional {
            $(
                #[serde(skip_serializing_if = "Option::is_none", serialize_with = "plain_some")]
                $number: Option<f64>,
            )+
            $(#[serde(skip_serializing_if = "Option::is_none")] $text: Option<String>,)+
        }

        /// The optional columns that a file has.
        struct OptionalColumns { $($number: Option<Column>,)+ $($text: Option<Column>,)+ }

        impl OptionalColumns {
            fn new(header: &Header) -> Self {
                Self {
                    $($number: header.find(stringify!($number)),)+
                    $($text: header.find(stringify!($text)),)+
                }
            }

            fn read(&self, row: &Row<'_>) -> Result<Optional, Bad> {
                Ok(Optional {
                    $($number: row.number_of(self.$number)?,)+
                    $($text: row.owned(self.$text),)+
                })
            }
        }

        const OPTIONAL: &[&str] = &[$(stringify!($number),)+ $(stringify!($text),)+];

        impl Optional {
            /// The cells in the order of `OPTIONAL`.
            fn cells(&self) -> Vec<Option<String>> {
                vec![$(self.$number.map(|x| x.to_string()),)+ $(self.$text.clone(),)+]
            }
        }
    };
}

optional! {
    numbers: gpus_max, scaling, steps, step_s, batch, stage_storage_s, stage_cpu_s, stage_gpu_s,
        stage_network_s, deadline_s, value, weight, queue_s, attempts, mem_mib, cpu_milli,
        gpu_milli, machines, gpu_util, fair_share_s, max_slowdown, slo_ms, timeout_ms, warm_up_s, batch_min,
        batch_max, noise_scale, noise_scale_end;
    texts: model, team, user, class, status, kinds, soft_deadlines, failure, load, bursts, requests,
        lr_rule, mem_by_batch;
}

const REQUIRED: [&str; 4] = ["id", "submit_s", "gpus", "duration_s"];

pub(super) fn rows(header: &Header) -> Result<RowReader, Problem> {
    let [id, submit, gpus, duration] = header.require(REQUIRED)?;
    let optional = OptionalColumns::new(header);
    Ok(Box::new(move |row| {
        let raw = Raw {
            id: row.text(id).to_owned(),
            submit_s: row.number(submit)?,
            gpus: row.number(gpus)?,
            duration_s: row.number(duration)?,
            more: optional.read(row)?,
        };
        to_job(raw).map(Some)
    }))
}

pub(super) fn read_jsonl(source: &mut Source, collector: &mut Collector) -> Result<(), TraceError> {
    while source.next_line()? {
        let job = source.text().map_err(Bad::from).and_then(|line| {
            let raw = serde_json::from_str(line).map_err(|e| Problem::Json(json_message(&e)))?;
            to_job(raw).map(Some)
        });
        if !collector.add(source, source.line(), job)? {
            break;
        }
    }
    Ok(())
}

/// Text of a JSON error, with its place relative to the object instead of the file.
pub(super) fn json_message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    let text = text.replace("expected f64", "expected a number");
    // Errors of flattened structs have no place.
    match (error.line(), error.column()) {
        (0, _) | (1, 0) => text,
        (1, column) => format!("{text}, at character {column}"),
        (line, _) => format!("{text}, at line {line} of the object"),
    }
}

/// Converts an optional value with `to`; errors name the column.
fn maybe<T>(
    column: &'static str,
    value: Option<f64>,
    to: impl FnOnce(f64) -> Result<T, Problem>,
) -> Result<Option<T>, Bad> {
    value.map(to).transpose().map_err(|problem| Bad::at(column, problem))
}

/// A count whose 0 means unknown.
fn count(column: &'static str, value: Option<f64>) -> Result<u32, Bad> {
    Ok(maybe(column, value, |v| field::whole(v, u32::MAX))?.unwrap_or(0))
}

fn name<T: FromStr<Err = super::UnknownName>>(
    column: &'static str,
    text: Option<String>,
) -> Result<Option<T>, Bad> {
    let Some(text) = text else { return Ok(None) };
    text.parse().map(Some).map_err(|unknown: super::UnknownName| {
        Bad::at(column, Problem::expected(format!("one of {}", unknown.known), &text))
    })
}

fn to_job(raw: Raw) -> Result<TraceJob, Bad> {
    let at = |column| move |problem| Bad::at(column, problem);
    let more = raw.more;
    let seconds = |v| field::seconds(v, Unit::Seconds);
    let submit_us = field::micros(raw.submit_s, Unit::Seconds).map_err(at("submit_s"))?;
    let gpus = field::gpus(raw.gpus).map_err(at("gpus"))?;
    let duration_s = seconds(raw.duration_s).map_err(at("duration_s"))?;
    let mut job = TraceJob::new(raw.id, submit_us, gpus, duration_s);
    job.gpus_max = maybe("gpus_max", more.gpus_max, |v| field::gpus_max(v, gpus))?;
    job.scaling = maybe("scaling", more.scaling, field::scaling)?;
    let steps = maybe("steps", more.steps, field::steps)?;
    let step_s = maybe("step_s", more.step_s, |v| field::positive_seconds(v, Unit::Seconds))?;
    (job.steps, job.step_s) = match (steps, step_s) {
        (Some(steps), Some(step_s)) => (steps, step_s),
        (Some(steps), None) if steps > 0.0 && duration_s > 0.0 => (steps, duration_s / steps),
        (None, Some(step_s)) => (duration_s / step_s, step_s),
        // Without work or duration, the step time is undefined.
        (Some(0.0), None) => (0.0, 1.0),
        (_, None) => (duration_s, 1.0),
    };
    job.batch = count("batch", more.batch)?;
    let stages = [
        maybe("stage_storage_s", more.stage_storage_s, seconds)?,
        maybe("stage_cpu_s", more.stage_cpu_s, seconds)?,
        maybe("stage_gpu_s", more.stage_gpu_s, seconds)?,
        maybe("stage_network_s", more.stage_network_s, seconds)?,
    ];
    if stages.iter().any(Option::is_some) {
        job.stages_s = Some(stages.map(Option::unwrap_or_default));
    }
    job.deadline_us = maybe("deadline_s", more.deadline_s, |v| field::micros(v, Unit::Seconds))?;
    job.value = maybe("value", more.value, field::number)?;
    job.weight = maybe("weight", more.weight, field::number)?.unwrap_or(1.0);
    job.queue_s = maybe("queue_s", more.queue_s, seconds)?;
    job.attempts = count("attempts", more.attempts)?;
    job.mem_mib = count("mem_mib", more.mem_mib)?;
    job.cpu_milli = count("cpu_milli", more.cpu_milli)?;
    job.gpu_milli = maybe("gpu_milli", more.gpu_milli, field::gpu_milli)?.unwrap_or(1000);
    let fair_share_s = maybe("fair_share_s", more.fair_share_s, seconds)?;
    if let Some(part) = fair_share_s.filter(|part| job.queue_s.is_none_or(|all| *part > all)) {
        let problem = Problem::expected("a part of queue_s", &part.to_string());
        return Err(Bad::at("fair_share_s", problem));
    }
    job.training = training(&job, &more)?;
    job.observed = Observed {
        machines: count("machines", more.machines)?,
        gpu_util: maybe("gpu_util", more.gpu_util, field::share)?,
        fair_share_s,
        failure: more.failure,
    }
    .boxed();
    job.model = more.model;
    job.team = more.team;
    job.user = more.user;
    let class = name("class", more.class)?;
    let at_least_1 = |v: f64| {
        if v >= 1.0 { Ok(v) } else { Err(Problem::expected("a number from 1", &v.to_string())) }
    };
    let asked = maybe("max_slowdown", more.max_slowdown, at_least_1)?;
    // Whoever writes that a job is guaranteed means it.
    let promised = (class == Some(TraceClass::Guaranteed)).then_some(GUARANTEED_SLOWDOWN);
    job.max_slowdown = asked.or(promised);
    job.class = class.unwrap_or(TraceClass::Guaranteed);
    job.status = name::<Status>("status", more.status)?;
    let service = TraceService {
        slo_ms: maybe("slo_ms", more.slo_ms, positive)?,
        timeout_ms: maybe("timeout_ms", more.timeout_ms, seconds)?,
        warm_up_s: maybe("warm_up_s", more.warm_up_s, seconds)?,
        batch_s: step_s,
        measured: false,
        load: load(&more.load.unwrap_or_default()).map_err(at("load"))?,
        bursts: more.bursts.as_deref().map(bursts).transpose().map_err(at("bursts"))?,
        recorded_in: more.requests,
        recorded: None,
    };
    let has_service_columns =
        TraceService { batch_s: None, ..service.clone() } != TraceService::default();
    if job.class == TraceClass::Service {
        job.service = Some(Box::new(service));
    } else if has_service_columns {
        let problem = Problem::expected("service, where a latency or a load is given", "training");
        return Err(Bad::at("class", problem));
    }
    job.gpu_models = more.kinds.map_or_else(Vec::new, |kinds| {
        kinds.split('|').filter(|kind| !kind.is_empty()).map(str::to_owned).collect()
    });
    job.soft_deadlines =
        soft_deadlines(&more.soft_deadlines.unwrap_or_default()).map_err(at("soft_deadlines"))?;
    Ok(job)
}

fn positive(value: f64) -> Result<f64, Problem> {
    field::positive_seconds(value, Unit::Seconds)
}

/// `200`, or `0:200|100:600`: 200 requests per second, and 600 from 100 s on.
fn load(text: &str) -> Result<Vec<(f64, f64)>, Problem> {
    let parts: Vec<&str> = text.split('|').filter(|part| !part.is_empty()).collect();
    let wrong = || Problem::expected("requests per second like 200 or 0:200|100:600", text);
    let number = |text: &str| field::parse(text).and_then(|v| field::seconds(v, Unit::Seconds));
    let rates: Vec<(f64, f64)> = parts
        .iter()
        .map(|part| match part.split_once(':') {
            Some((at, rps)) => Ok((number(at)?, number(rps)?)),
            None if parts.len() == 1 => Ok((0.0, number(part)?)),
            None => Err(wrong()),
        })
        .collect::<Result<_, Problem>>()?;
    let is_valid = rates.is_sorted_by(|a, b| a.0 < b.0) && rates.first().is_none_or(|r| r.0 == 0.0);
    if is_valid { Ok(rates) } else { Err(wrong()) }
}

/// `3:10:90`: bursts of 10 s on average at three times the rate of the 90 s between them.
fn bursts(text: &str) -> Result<Bursts, Problem> {
    let wrong = || Problem::expected("times:burst_s:calm_s like 3:10:90", text);
    let numbers: Vec<f64> = text
        .split(':')
        .map(|part| field::parse(part).and_then(positive))
        .collect::<Result<_, _>>()
        .map_err(|_| wrong())?;
    match numbers[..] {
        [times, burst_s, calm_s] if times >= 1.0 => Ok(Bursts { times, burst_s, calm_s }),
        _ => Err(wrong()),
    }
}

/// The allowed batch sizes of a job, if it allows any but its own.
fn training(job: &TraceJob, more: &Optional) -> Result<Option<Box<Training>>, Bad> {
    let (low, high) = (count("batch_min", more.batch_min)?, count("batch_max", more.batch_max)?);
    if low == 0 && high == 0 {
        return Ok(None);
    }
    let noise = |column, value| maybe(column, value, field::number);
    let start = noise("noise_scale", more.noise_scale)?.unwrap_or(0.0);
    let end = noise("noise_scale_end", more.noise_scale_end)?.unwrap_or(start);
    let lr = match more.lr_rule.as_deref() {
        None => LrRule::default(),
        Some("linear") => LrRule::Linear,
        Some("square_root") => LrRule::SquareRoot,
        Some("keep") => LrRule::Keep,
        Some(other) => {
            let problem = Problem::expected("one of linear, square_root, keep", other);
            return Err(Bad::at("lr_rule", problem));
        }
    };
    let training = Training {
        batch: job.batch,
        batch_min: if low == 0 { job.batch } else { low },
        batch_max: if high == 0 { job.batch } else { high },
        lr,
        noise: Noise { start: start as f32, end: end as f32 },
        memory: mem_by_batch(more.mem_by_batch.as_deref().unwrap_or_default())
            .map_err(|problem| Bad::at("mem_by_batch", problem))?,
    };
    if !training.is_sane() {
        let found = format!("{} ≤ {} ≤ {}", training.batch_min, job.batch, training.batch_max);
        let problem = Problem::expected("1 ≤ batch_min ≤ batch ≤ batch_max", &found);
        return Err(Bad::at("batch_min", problem));
    }
    Ok(Some(Box::new(training)))
}

/// `64:1000|128:1640`: 1000 MiB at batch 64, 1640 at 128.
fn mem_by_batch(text: &str) -> Result<Vec<(u32, u32)>, Problem> {
    let parts = text.split('|').filter(|part| !part.is_empty());
    let points: Vec<(u32, u32)> = parts
        .map(|part| {
            let pair = part.split_once(':');
            let (batch, mib) =
                pair.ok_or_else(|| Problem::expected("pairs like 64:1000|128:1640", part))?;
            let whole = |text| field::parse(text).and_then(|v| field::whole(v, u32::MAX));
            Ok((whole(batch)?, whole(mib)?))
        })
        .collect::<Result<_, Problem>>()?;
    if points.is_sorted_by(|a, b| a.0 < b.0) {
        return Ok(points);
    }
    Err(Problem::expected("ascending batch sizes", text))
}

/// `600:10|1200:8`: value 10 by 600 s, value 8 by 1200 s.
fn soft_deadlines(text: &str) -> Result<Vec<(u64, f64)>, Problem> {
    let parts = text.split('|').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let (at, value) = part
                .split_once(':')
                .ok_or_else(|| Problem::expected("pairs like 600:10|1200:8", part))?;
            let at = field::parse(at).and_then(|v| field::micros(v, Unit::Seconds))?;
            Ok((at, field::parse(value).and_then(field::number)?))
        })
        .collect()
}

/// Below 2^32 s the nearest double to a decimal of six places still distinguishes every
/// microsecond.
fn to_seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn to_raw(job: &TraceJob) -> Raw {
    let known = |n: u32, absent: u32| (n != absent).then_some(f64::from(n));
    let stage = |i: usize| job.stages_s.map(|stages| stages[i]);
    let has_batch_s = job.service.as_ref().is_some_and(|s| s.batch_s.is_some());
    let timed = has_batch_s || job.step_s != 1.0 || job.steps != job.duration_s;
    let soft: Vec<String> = job
        .soft_deadlines
        .iter()
        .map(|(at, value)| format!("{}:{value}", to_seconds(*at)))
        .collect();
    let training = job.training.as_deref();
    let memory: Vec<String> = training
        .map_or(&[][..], |t| &t.memory)
        .iter()
        .map(|(batch, mib)| format!("{batch}:{mib}"))
        .collect();
    let lr_rule = training.filter(|t| t.lr != LrRule::default()).map(|t| match t.lr {
        LrRule::Linear => "linear".to_owned(),
        LrRule::SquareRoot => "square_root".to_owned(),
        LrRule::Keep => "keep".to_owned(),
    });
    let joined = |parts: &[String]| (!parts.is_empty()).then(|| parts.join("|"));
    let class = (job.class != TraceClass::Guaranteed).then(|| job.class.to_string());
    let service = job.service.as_deref();
    let rate = |(at, rps): &(f64, f64)| format!("{at}:{rps}");
    let load: Vec<String> = service.iter().flat_map(|s| s.load.iter().map(rate)).collect();
    let bursts = service.and_then(|s| s.bursts);
    Raw {
        id: job.id.clone(),
        submit_s: to_seconds(job.submit_us),
        gpus: f64::from(job.gpus),
        duration_s: job.duration_s,
        more: Optional {
            gpus_max: job.gpus_max.map(f64::from),
            scaling: job.scaling,
            steps: timed.then_some(job.steps),
            step_s: timed.then_some(job.step_s),
            batch: known(job.batch, 0),
            stage_storage_s: stage(0),
            stage_cpu_s: stage(1),
            stage_gpu_s: stage(2),
            stage_network_s: stage(3),
            deadline_s: job.deadline_us.map(to_seconds),
            value: job.value,
            weight: (job.weight != 1.0).then_some(job.weight),
            queue_s: job.queue_s,
            attempts: known(job.attempts, 0),
            mem_mib: known(job.mem_mib, 0),
            cpu_milli: known(job.cpu_milli, 0),
            gpu_milli: known(job.gpu_milli, 1000),
            model: job.model.clone(),
            team: job.team.clone(),
            user: job.user.clone(),
            class,
            status: job.status.map(|status| status.to_string()),
            kinds: joined(&job.gpu_models),
            soft_deadlines: joined(&soft),
            machines: known(job.observed().machines, 0),
            gpu_util: job.observed().gpu_util,
            fair_share_s: job.observed().fair_share_s,
            max_slowdown: job.max_slowdown,
            failure: job.observed().failure.clone(),
            slo_ms: service.and_then(|s| s.slo_ms),
            timeout_ms: service.and_then(|s| s.timeout_ms),
            warm_up_s: service.and_then(|s| s.warm_up_s),
            load: joined(&load),
            bursts: bursts.map(|b| format!("{}:{}:{}", b.times, b.burst_s, b.calm_s)),
            requests: service.and_then(|s| s.recorded_in.clone()),
            batch_min: training.map(|t| f64::from(t.batch_min)),
            batch_max: training.map(|t| f64::from(t.batch_max)),
            noise_scale: training.map(|t| f64::from(t.noise.start)),
            noise_scale_end: training
                .filter(|t| t.noise.end != t.noise.start)
                .map(|t| f64::from(t.noise.end)),
            lr_rule,
            mem_by_batch: joined(&memory),
        },
    }
}

/// Writes jobs as CSV, with only those optional columns that some job uses.
///
/// A line break inside a name is an error: the format has one job per line.
pub fn write_csv(to: &mut impl Write, jobs: &[TraceJob]) -> io::Result<()> {
    let mut used = [false; OPTIONAL.len()];
    // Checked before the first byte is written, so that an error leaves no partial file.
    for job in jobs {
        let cells = to_raw(job).more.cells();
        cells.iter().flatten().chain([&job.id]).try_for_each(|text| one_line(text))?;
        for (used, cell) in used.iter_mut().zip(cells) {
            *used |= cell.is_some();
        }
    }
    let names = OPTIONAL.iter().zip(used).filter(|(_, used)| *used).map(|(name, _)| *name);
    writeln!(to, "{}", REQUIRED.into_iter().chain(names).collect::<Vec<_>>().join(","))?;
    for job in jobs {
        let raw = to_raw(job);
        write_cell(to, &raw.id)?;
        write!(to, ",{},{},{}", raw.submit_s, raw.gpus, raw.duration_s)?;
        for (cell, _) in raw.more.cells().into_iter().zip(used).filter(|(_, used)| *used) {
            to.write_all(b",")?;
            write_cell(to, &cell.unwrap_or_default())?;
        }
        to.write_all(b"\n")?;
    }
    Ok(())
}

fn one_line(text: &str) -> io::Result<()> {
    if !text.contains(['\n', '\r']) {
        return Ok(());
    }
    let message = format!("a line break in {text:?} cannot be written as CSV, only as .jsonl");
    Err(io::Error::new(io::ErrorKind::InvalidInput, message))
}

fn write_cell(to: &mut impl Write, text: &str) -> io::Result<()> {
    if text.contains([',', '"']) {
        write!(to, "\"{}\"", text.replace('"', "\"\""))
    } else {
        to.write_all(text.as_bytes())
    }
}

/// Writes jobs as JSON lines.
pub fn write_jsonl(to: &mut impl Write, jobs: &[TraceJob]) -> io::Result<()> {
    for job in jobs {
        serde_json::to_writer(&mut *to, &to_raw(job))?;
        to.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Format, ReadOptions, Trace, read};
    use super::*;
    use proptest::option;
    use proptest::prelude::*;

    fn read_back(bytes: &[u8]) -> Trace {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        read(file.path(), &ReadOptions::default()).unwrap()
    }

    fn time_us() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..10_000_000, 0u64..3_155_760_000_000_000]
    }

    /// Names without line breaks, which the format cannot hold.
    fn name() -> impl Strategy<Value = String> {
        "[a-z0-9 ,\"'é#;:/-]{0,8}[a-z]"
    }

    prop_compose! {
        fn job()(
            (name, submit_us, gpus, duration_s) in (name(), time_us(), 1u32..=65_535, 0.0f64..3e9),
            (steps, step_s) in prop_oneof![Just((0.0, 1.0)), (0.0f64..1e6, 1e-9f64..1e3)],
            (model, team, user) in (option::of(name()), option::of(name()), option::of(name())),
            stages_s in option::of([0.0f64..9.0, 0.0f64..9.0, 0.0f64..9.0, 0.0f64..9.0]),
            (class, status) in (0..TraceClass::ALL.len(), option::of(0..Status::ALL.len())),
            (deadline_us, value, weight) in
                (option::of(time_us()), option::of(0.0f64..1e300), 0.0f64..9.0),
            max_slowdown in option::of(1.0f64..100.0),
            soft_deadlines in prop::collection::vec((time_us(), 0.0f64..100.0), 0..3),
            (queue_s, attempts) in (option::of(0.0f64..1e9), any::<u32>()),
            (batch, mem_mib, cpu_milli) in any::<(u32, u32, u32)>(),
            gpu_milli in 1u32..=1000,
            kinds in prop::collection::vec("[a-z0-9, ]{1,6}", 0..3),
            (more, scaling) in (option::of(0u32..65_535), option::of(0.0f64..2.0)),
            (machines, gpu_util, fair_part) in
                (any::<u32>(), option::of(0.0f64..=1.0), option::of(0.0f64..=1.0)),
            failure in option::of(name()),
            service in service(),
            (rule, noise) in (0usize..4, [0.0f32..1e9, 0.0f32..1e9]),
            (below, above) in (0u32..100, 0u32..100),
            points in prop::collection::btree_map(1u32..100_000, any::<u32>(), 0..4),
        ) -> TraceJob {
            let lr = [LrRule::Linear, LrRule::SquareRoot, LrRule::Keep].get(rule);
            let training = lr.filter(|_| batch > 0).map(|lr| Box::new(Training {
                batch,
                batch_min: batch.saturating_sub(below).max(1),
                batch_max: batch.saturating_add(above),
                lr: *lr,
                noise: Noise { start: noise[0], end: noise[1] },
                memory: points.into_iter().collect(),
            }));
            let class = TraceClass::ALL[class];
            let timed = step_s != 1.0 || steps != duration_s;
            let service = TraceService { batch_s: timed.then_some(step_s), ..service };
            let service = (class == TraceClass::Service).then(|| Box::new(service));
            let gpus_max = more.map(|more| (gpus + more).min(65_535));
            let status = status.map(|i| Status::ALL[i]);
            TraceJob {
                id: name, submit_us, gpus, steps, step_s, duration_s, model, batch, stages_s, team,
                user, class, max_slowdown, deadline_us, value, soft_deadlines, weight, status, queue_s, attempts,
                mem_mib, cpu_milli, gpu_milli, gpu_models: kinds, gpus_max, scaling,
                sensitivity: None, model_speed: Vec::new(), service, training,
                observed: Observed {
                    machines, gpu_util, failure,
                    fair_share_s: queue_s.and_then(|all| fair_part.map(|part| all * part)),
                }.boxed(),
            }
        }
    }

    prop_compose! {
        fn service()(
            (slo_ms, timeout_ms) in (option::of(1e-3f64..1e6), option::of(0.0f64..1e6)),
            warm_up_s in option::of(0.0f64..1e6),
            gaps in prop::collection::vec((1.0f64..1e4, 0.0f64..1e5), 0..3),
            bursts in option::of((1.0f64..9.0, 1e-3f64..1e3, 1e-3f64..1e3)),
        ) -> TraceService {
            let mut at = 0.0;
            let load = gaps.into_iter().map(|(gap, rps)| {
                at += gap;
                (at - gap, rps)
            });
            let bursts = bursts.map(|(times, burst_s, calm_s)| Bursts { times, burst_s, calm_s });
            let load = load.enumerate().map(|(i, r)| if i == 0 { (0.0, r.1) } else { r }).collect();
            TraceService { slo_ms, timeout_ms, warm_up_s, load, bursts, ..TraceService::default() }
        }
    }

    #[test]
    fn a_service_has_an_slo_and_a_load() {
        let trace = read_back(
            b"id,submit_s,gpus,duration_s,class,slo_ms,load,bursts\n\
              a,0,1,0,service,150,200,\nb,0,1,9,service,,0:200|100:600,3:10:90\nc,0,1,5,,,,\n",
        );
        let [a, b] = [0, 1].map(|i| trace.jobs[i].service.clone().unwrap());
        assert_eq!((a.slo_ms, a.load), (Some(150.0), vec![(0.0, 200.0)]));
        assert_eq!(b.load, [(0.0, 200.0), (100.0, 600.0)]);
        assert_eq!(b.bursts, Some(Bursts { times: 3.0, burst_s: 10.0, calm_s: 90.0 }));
        assert_eq!(trace.jobs[2].service, None);
    }

    #[test]
    fn an_invalid_load_is_named() {
        let wrong = |row: &str| {
            let text = format!("id,submit_s,gpus,duration_s,class,slo_ms,load,bursts\n{row}\n");
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            let error = read(file.path(), &ReadOptions::default()).unwrap_err();
            (error.column.unwrap(), error.problem.to_string())
        };
        for (row, column) in [
            ("a,0,1,0,service,150,5:200,", "load"),
            ("a,0,1,0,service,150,0:200|0:300,", "load"),
            ("a,0,1,0,service,150,0:200|300,", "load"),
            ("a,0,1,0,service,150,200,3:10", "bursts"),
            ("a,0,1,0,service,150,200,0.5:10:90", "bursts"),
            ("a,0,1,0,service,0,200,", "slo_ms"),
            ("a,0,1,0,,150,200,", "class"),
        ] {
            assert_eq!(wrong(row).0, column, "{row}: {}", wrong(row).1);
        }
    }

    fn distinct(jobs: Vec<TraceJob>) -> Vec<TraceJob> {
        let number = |(i, job): (usize, TraceJob)| TraceJob { id: format!("{}{i}", job.id), ..job };
        let mut jobs: Vec<TraceJob> = jobs.into_iter().enumerate().map(number).collect();
        jobs.sort_by_key(|job| job.submit_us);
        jobs
    }

    proptest! {
        #[test]
        fn written_jobs_read_back_exactly(jobs in prop::collection::vec(job(), 1..6)) {
            let jobs = distinct(jobs);
            let (mut csv, mut jsonl) = (Vec::new(), Vec::new());
            write_csv(&mut csv, &jobs).unwrap();
            write_jsonl(&mut jsonl, &jobs).unwrap();
            for bytes in [csv, jsonl] {
                let trace = read_back(&bytes);
                prop_assert_eq!(trace.format, Format::Roommate);
                prop_assert_eq!(&trace.jobs, &jobs, "{}", String::from_utf8_lossy(&bytes));
            }
        }
    }

    #[test]
    fn steps_follow_from_the_given_columns() {
        let trace = read_back(
            b"step_s,extra,steps,id,submit_s,gpus,duration_s\n\
              ,x,10,a,0,1,5\n0.25,x,,b,0,1,5\n2,x,3,c,0,1,5\n,x,,d,0,1,5\n",
        );
        let work: Vec<(f64, f64)> = trace.jobs.iter().map(|j| (j.steps, j.step_s)).collect();
        assert_eq!(work, [(10.0, 0.5), (20.0, 0.25), (3.0, 2.0), (5.0, 1.0)]);
    }

    #[test]
    fn json_accepts_handwritten_numbers() {
        let job =
            TraceJob { model: Some("net".into()), ..TraceJob::new("a".into(), 1_500_000, 4, 60.0) };
        let mut text = Vec::new();
        write_jsonl(&mut text, &[job]).unwrap();
        let expected =
            "{\"id\":\"a\",\"submit_s\":1.5,\"gpus\":4,\"duration_s\":60,\"model\":\"net\"}\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }

    #[test]
    fn a_line_break_is_refused() {
        let jobs = ["a", "a\nb"].map(|name| TraceJob::new(name.into(), 0, 1, 1.0));
        let mut text = Vec::new();
        let error = write_csv(&mut text, &jobs).unwrap_err();
        let expected = "a line break in \"a\\nb\" cannot be written as CSV, only as .jsonl";
        assert_eq!(error.to_string(), expected);
        assert!(text.is_empty(), "no partial file");
    }
}
