//! Kubernetes: pods, events and audit logs as JSON documents, one after another: what `kubectl get
//! -o json` prints, with `--watch` or without, and the lines of an audit log.
//! `docs/reference/trace-format.md` has the commands.
//!
//! Later states of a pod replace earlier ones. Pods of one gang, or attempts of one task, become
//! one job: its GPUs are the most that its pods had at the same time, its length is the time in
//! which any of them ran. One object at a time is in memory as JSON.

mod objects;

use super::collect::Collector;
use super::error::{Problem, TraceError};
use super::field;
use super::lines::Source;
use super::{Remark, Remarks, Status, TraceClass, TraceJob};
use objects::{Object, PodState};
use serde::Deserializer as _;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::io;

/// How much of the start of a file tells what it is.
const START: usize = 400;

/// Whether a JSON file begins with an object of Kubernetes, or with an event of a watch.
pub(super) fn is_start(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(&text[..text.len().min(START)]);
    ["\"apiVersion\"", "\"kind\"", "\"object\""].into_iter().any(|key| text.contains(key))
}

/// Reads all documents of a file.
pub(super) fn read(source: &mut Source, collector: &mut Collector) -> Result<(), TraceError> {
    let mut history = History { stops: !collector.skips(), ..History::default() };
    let parsed = parse(source, &mut history);
    // What was found before an error of the file is reported first.
    for problem in std::mem::take(&mut history.rejected) {
        collector.reject(source.whole_file(problem))?;
    }
    if let Err(error) = parsed {
        collector.reject(error)?;
    }
    history.finish(source, collector)
}

fn parse(source: &mut Source, history: &mut History) -> Result<(), TraceError> {
    let before = source.line();
    let mut bytes = Bytes { source, failed: None };
    let mut parser = serde_json::Deserializer::from_reader(&mut bytes);
    let parsed = loop {
        match (&mut parser).deserialize_any(Document(history)) {
            Ok(()) if history.stops && !history.rejected.is_empty() => break Ok(()),
            Ok(()) => {}
            Err(e) => break Err(e),
        }
        // Otherwise there is another document.
        if parser.end().is_ok() {
            break Ok(());
        }
    };
    drop(parser);
    let failed = bytes.failed.take();
    match (parsed, failed) {
        (_, Some(error)) => Err(error),
        (Err(e), None) => {
            let problem = if e.is_eof() {
                Problem::Json("the file ends inside of it".to_owned())
            } else {
                Problem::JsonFile(
                    e.to_string().split(" at line ").next().unwrap_or_default().to_owned(),
                )
            };
            Err(source.error_at(before + e.line() as u64, problem.into()))
        }
        (Ok(()), None) => Ok(()),
    }
}

/// The bytes of the file for the parser.
struct Bytes<'a> {
    source: &'a mut Source,
    failed: Option<TraceError>,
}

impl io::Read for Bytes<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let chunk = match self.source.chunk() {
            Ok(chunk) => chunk,
            Err(error) => {
                let told = io::Error::other(error.to_string());
                self.failed = Some(error);
                return Err(told);
            }
        };
        let n = chunk.len().min(to.len());
        to[..n].copy_from_slice(&chunk[..n]);
        self.source.consume(n, 0);
        Ok(n)
    }
}

/// One document: an object, or a list whose `items` are taken one by one.
struct Document<'a>(&'a mut History);

impl<'de> Visitor<'de> for Document<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of Kubernetes")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut whole = Map::new();
        let mut is_list = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "items" {
                is_list = true;
                map.next_value_seed(Items(self.0))?;
            } else {
                whole.insert(key, map.next_value()?);
            }
        }
        if !is_list {
            self.0.add(Value::Object(whole));
        }
        Ok(())
    }
}

/// The items of a list.
struct Items<'a>(&'a mut History);

impl<'de> DeserializeSeed<'de> for Items<'_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    /// An empty list of the API server.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element()? {
            self.0.add(item);
        }
        Ok(())
    }
}

/// All that the file tells of pods.
#[derive(Default)]
struct History {
    /// By namespace, name and UID.
    pods: BTreeMap<(String, String), Vec<PodState>>,
    /// What events tell of pods: first start and last end, in seconds since 1970.
    times: Vec<objects::Times>,
    /// The latest time in the file, in seconds since 1970: pods without an end ran until then.
    now_s: u64,
    remarks: Remarks,
    rejected: Vec<Problem>,
    /// Whether the first invalid object is the last that counts.
    stops: bool,
}

impl History {
    fn add(&mut self, value: Value) {
        match Object::of(value) {
            Ok(Object::Pod(pod)) => self.upsert(*pod),
            Ok(Object::Times(times)) => {
                self.now_s = self.now_s.max(times.latest_s());
                self.times.push(times);
            }
            Ok(Object::Other) => *self.remarks.entry(Remark::OtherObject).or_default() += 1,
            Err(problem) => self.rejected.push(problem),
        }
    }

    /// A later state of a pod replaces the earlier one, but what only the earlier one tells stays.
    fn upsert(&mut self, pod: PodState) {
        self.now_s = self.now_s.max(pod.latest_s());
        let states = self.pods.entry((pod.namespace.clone(), pod.name.clone())).or_default();
        match states.iter_mut().find(|known| known.uid == pod.uid) {
            Some(known) => {
                let earlier = std::mem::replace(known, pod);
                known.submit_s = known.submit_s.or(earlier.submit_s);
                known.start_s = known.start_s.or(earlier.start_s);
                known.end_s = known.end_s.or(earlier.end_s);
                known.status = known.status.or(earlier.status);
            }
            None => states.push(pod),
        }
    }

    /// Fills in times that only events have. An event names the UID, or means the last pod of the
    /// name.
    fn apply_times(&mut self) {
        for times in std::mem::take(&mut self.times) {
            let states = self.pods.get_mut(&(times.namespace.clone(), times.name.clone()));
            let pod = states.and_then(|states| match &times.uid {
                Some(uid) => states.iter_mut().find(|pod| pod.uid == *uid),
                None => states.last_mut(),
            });
            let Some(pod) = pod else {
                *self.remarks.entry(Remark::UnknownPod).or_default() += 1;
                continue;
            };
            pod.start_s = pod.start_s.or(times.start_s);
            if pod.end_s.is_none() && times.end_s.is_some() {
                pod.end_s = times.end_s;
                pod.status = pod.status.or(Some(Status::Killed));
            }
        }
    }

    fn finish(mut self, source: &Source, collector: &mut Collector) -> Result<(), TraceError> {
        self.apply_times();
        let mut gangs: BTreeMap<String, Vec<PodState>> = BTreeMap::new();
        for pod in self.pods.into_values().flatten() {
            match pod.left_out() {
                Some(remark) => *self.remarks.entry(remark).or_default() += 1,
                None => gangs.entry(pod.job.clone()).or_default().push(pod),
            }
        }
        for (remark, n) in self.remarks {
            collector.remarks(remark, n);
        }
        for (id, pods) in gangs {
            let (job, still) = job(id, &pods, self.now_s);
            if still {
                collector.remarks(Remark::StillRan, 1);
            }
            if !collector.add(source, source.line(), Ok(Some(job)))? {
                break;
            }
        }
        Ok(())
    }
}

/// The job of these pods, and whether one of them still ran at the end of the file.
fn job(id: String, pods: &[PodState], now_s: u64) -> (TraceJob, bool) {
    let ran = |pod: &PodState| {
        let start = pod.start_s?;
        Some((start, pod.end_s.unwrap_or(now_s).max(start), pod.gpus))
    };
    let stays: Vec<(u64, u64, u32)> = pods.iter().filter_map(ran).collect();
    let union = Union::of(&stays);
    let submit_s = pods.iter().filter_map(|p| p.submit_s.or(p.start_s)).min().unwrap_or(now_s);
    let gpus = union.most_gpus.clamp(1, field::MAX_GPUS);
    let mut job = TraceJob::new(id, submit_s * 1_000_000, gpus, union.seconds as f64);
    job.queue_s = union.start_s.checked_sub(submit_s).map(|s| s as f64);
    job.attempts = union.runs;
    let last = pods.iter().max_by_key(|pod| (pod.end_s.unwrap_or(now_s), pod.start_s));
    if let Some(last) = last {
        job.status = last.status;
        job.team = Some(last.team.clone());
        job.model.clone_from(&last.kind);
        job.cpu_milli = (f64::from(last.cpu_milli) / f64::from(last.gpus.max(1))) as u32;
        job.gpu_models.extend(last.gpu_model.clone());
        job.mem_mib = last.mem_mib;
        if last.best_effort {
            job.class = TraceClass::BestEffort;
        }
    }
    (job, pods.iter().any(|pod| pod.start_s.is_some() && pod.end_s.is_none()))
}

/// Stays on GPUs of one job, put together.
#[derive(Default)]
struct Union {
    start_s: u64,
    /// Seconds in which there was any.
    seconds: u64,
    /// Stretches without a gap.
    runs: u32,
    most_gpus: u32,
}

impl Union {
    fn of(stays: &[(u64, u64, u32)]) -> Self {
        // Ends come before starts at the same second: an attempt that follows is no companion.
        let ends = stays.iter().map(|(_, end, gpus)| (*end, 0, *gpus));
        let starts = stays.iter().map(|(start, _, gpus)| (*start, 1, *gpus));
        let mut moments: Vec<(u64, u8, u32)> = ends.chain(starts).collect();
        moments.sort_unstable();
        let start_s = stays.iter().map(|s| s.0).min().unwrap_or(0);
        // Stays of no length are counted by their GPUs alone.
        let most_gpus = stays.iter().map(|s| s.2).max().unwrap_or(0);
        let mut found = Self { start_s, most_gpus, ..Self::default() };
        let (mut here, mut gpus, mut since) = (0i64, 0i64, 0);
        for (at, starts, n) in moments {
            if here > 0 {
                found.seconds += at - since;
            }
            since = at;
            let sign = if starts == 1 { 1 } else { -1 };
            found.runs += u32::from(starts == 1 && here <= 0);
            here += sign;
            gpus += sign * i64::from(n);
            found.most_gpus = found.most_gpus.max(u32::try_from(gpus).unwrap_or(0));
        }
        found
    }
}

#[cfg(test)]
mod tests;
