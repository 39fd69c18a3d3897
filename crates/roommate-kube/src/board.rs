//! The dashboard of a cluster: the scheduler's journal while it grows, and an engine made of it
//! that is asked what would become of pods.
//!
//! ```text
//!  scheduler ── journal, piece by piece ──▶ Board ──▶ feed ──▶ page
//!      in its own process, or behind a forwarded port ┘
//! ```

pub(crate) mod written;

use crate::client::{Access, Client, Error, get};
use crate::manifest;
use crate::names;
use crate::objects::Pod;
use crate::snapshot::Snapshot;
use crate::snapshot::fetch::{Forwarded, Scheduler, page, unreachable};
use crate::webhook;
use crate::what_if::{self, Outcome, Verdict};
use roommate_agent::AgentError;
use roommate_agent::api::control::{Draft, JobView, Reply, Request, Then};
use roommate_agent::api::dashboard::feed::Watched;
use roommate_agent::api::dashboard::viewer::Live;
use roommate_agent::process::rotated_file::Place;
use roommate_core::idx::GpuIdx;
use roommate_core::journal::explain::Explain;
use roommate_core::journal::forecast::{self, Cost};
use roommate_core::journal::timeline::Timeline;
use roommate_core::journal::{self, Observer as _, Writer};
use roommate_core::number::Number;
use roommate_core::time::Time;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use tokio::runtime::Handle;
use written::{BEGINNING, NOW, Written};

/// How the journal is read from a place on.
type Read = Box<dyn Fn(Place) -> Result<Written, String> + Send + Sync>;

/// A cluster as the dashboard sees it. It is asked in threads of their own, beside the runtime.
pub struct Board {
    read: Read,
    client: Client,
    runtime: Handle,
}

impl Board {
    pub(crate) fn new(read: Read, client: Client, runtime: Handle) -> Self {
        Self { read, client, runtime }
    }

    /// Of a scheduler that is reached from here. A port that is forwarded to the leader is
    /// forwarded anew once it does not answer any more.
    pub fn of(client: Client, access: Access, scheduler: Scheduler, runtime: Handle) -> Self {
        let (own, asked) = (runtime.clone(), client.clone());
        let forwarded: Mutex<Option<Forwarded>> = Mutex::default();
        let read = move |from: Place| {
            let path = written::path(from);
            let mut forwarded = forwarded.lock().unwrap_or_else(PoisonError::into_inner);
            let text = own.block_on(async {
                let lease = match &scheduler {
                    Scheduler::At(at) => {
                        return page(at, &path).await.map_err(|e| unreachable(at, &e));
                    }
                    Scheduler::Leader(lease) => lease.as_ref(),
                };
                let port = match forwarded.take() {
                    Some(port) => port,
                    None => Forwarded::to_leader(&asked, &access, lease).await?,
                };
                let text = port.page(&path).await?;
                *forwarded = Some(port);
                Ok::<_, Error>(text)
            });
            let text = text.map_err(|e| e.to_string())?;
            serde_json::from_slice(&text).map_err(|e| format!("not a piece of a journal: {e}"))
        };
        Self::new(Box::new(read), client, runtime)
    }

    fn written(&self, from: Place) -> Result<Written, AgentError> {
        // It may lead, or have nodes, a moment later.
        (self.read)(from).map_err(|what| AgentError::Busy { what })
    }

    /// The whole journal, with an end.
    fn whole(&self) -> Result<Vec<u8>, AgentError> {
        let mut all: Vec<u8> = Vec::new();
        let mut from = BEGINNING;
        loop {
            let piece = self.written(from)?;
            if piece.next.part != from.part {
                all.clear();
            }
            if piece.lines.is_empty() {
                let mut end = Writer::new(&mut all);
                end.end(Time::from_secs(piece.now_s));
                end.finish().expect("memory can always be written to");
                return Ok(all);
            }
            all.extend(piece.lines.into_bytes());
            from = piece.next;
        }
    }

    /// The history of a pod or its gang, since the nodes changed last.
    fn history(&self, job: &str) -> Result<Reply, AgentError> {
        let mut story = Explain::new(job);
        let read = journal::read(self.whole()?.as_slice(), &mut story);
        read.map_err(|e| AgentError::Refused { what: e.to_string(), hint: None })?;
        if !story.found() {
            let what = format!("the scheduler's journal has no {job}");
            return Err(AgentError::refused(what, "it begins when the nodes changed last"));
        }
        Ok(Reply::History(story.moments))
    }

    /// What would become of the pods of a manifest; nothing is created.
    fn foresee(&self, text: &str) -> Result<Reply, AgentError> {
        let refused = |what: String| AgentError::Refused { what, hint: None };
        let mut pods =
            manifest::read(text).map_err(|(what, hint)| AgentError::refused(what, hint))?;
        // What is no pod at all would not hear so from the webhook.
        let pod = serde_json::from_value::<Pod>(pods.pod.clone());
        pod.map_err(|e| refused(format!("not a pod: {e}")))?;
        let admitted = webhook::admit(&pods.pod, names::SCHEDULER).map_err(refused)?;
        admitted.apply(&mut pods.pod);
        if pods.scheduler() != Some(names::SCHEDULER) {
            let what =
                format!("its pods name the scheduler {:?}", pods.scheduler().unwrap_or_default());
            return Err(AgentError::refused(
                what,
                format!("set spec.schedulerName: {}", names::SCHEDULER),
            ));
        }
        let namespace = pods.pod.pointer("/metadata/namespace").and_then(Value::as_str);
        let namespace = namespace.unwrap_or("default").to_string();
        let (pod, request) = pods.request(&namespace).map_err(refused)?;
        let nodes = self.runtime.block_on(get(&self.client, "/api/v1/nodes"));
        let nodes = nodes.map_err(|failure| refused(format!("list of nodes: {failure}")))?;
        let nodes = nodes.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        let allows = manifest::allows(&request, &nodes);
        let snapshot = Snapshot::of(&self.whole()?).map_err(|e| refused(e.to_string()))?;
        let first = snapshot.first_gpus();
        let question = pods.question(&pod, &request, &allows);
        let verdicts = what_if::ask(snapshot, &question).map_err(refused)?;
        Ok(Reply::Foreseen(Box::new(told(&verdicts, &first))))
    }

    fn carry_out(&self, request: Request) -> Result<Reply, AgentError> {
        match request {
            Request::History { job } => self.history(&job),
            Request::Draft(draft) if draft.then != Then::Submit => {
                let Draft { text, .. } = *draft;
                self.foresee(&text)
            }
            _ => {
                let what = "a cluster is changed through its API server, not here";
                Err(AgentError::refused(what, "use kubectl"))
            }
        }
    }
}

impl Watched for Board {
    fn world(&self) -> Result<(f64, Value), AgentError> {
        let now = self.written(NOW)?;
        Ok((now.now_s, json!({"verbs": ["draft", "history"], "outside": now.outside})))
    }

    fn jobs(&self) -> Result<Vec<JobView>, AgentError> {
        // The journal has all that the scheduler knows.
        Ok(Vec::new())
    }

    fn journal(&self, from: Place) -> Result<(Vec<u8>, Place), AgentError> {
        let piece = self.written(from)?;
        Ok((piece.lines.into_bytes(), piece.next))
    }

    fn timeline(&self) -> Timeline {
        // No daemon says what is believed.
        Timeline::with_beliefs()
    }
}

impl Live for Board {
    fn answer(&self, request: Request) -> Result<Reply, AgentError> {
        // A policy needs more stack than the threads of connections have.
        std::thread::scope(|scope| {
            let judged = scope.spawn(|| self.carry_out(request)).join();
            judged.unwrap_or_else(|_| {
                let what = "the scheduler's engine could not decide this".to_string();
                Err(AgentError::Refused { what, hint: None })
            })
        })
    }
}

/// Verdicts about the pods of one manifest in the words of the page: the first, and in short what
/// becomes of the others.
fn told(verdicts: &[Verdict], first: &BTreeMap<String, u32>) -> forecast::Verdict {
    let Some((one, more)) = verdicts.split_first() else {
        unreachable!("a manifest makes at least one pod")
    };
    let gpus = one.places.iter().flat_map(|place| {
        let of = first.get(&place.node).copied().unwrap_or_default();
        place.gpus.iter().map(move |number| GpuIdx(of + u32::from(*number)))
    });
    let others = more.iter().map(|verdict| match (verdict.outcome, verdict.starts_in_s) {
        (Outcome::Starts, _) => format!("{} would start at once", verdict.job),
        (Outcome::Waits, Some(s)) => format!("{} would wait, and start in {s:.0} s", verdict.job),
        (Outcome::Waits, None) => format!("{} would wait", verdict.job),
        (Outcome::Never, _) => format!("{} could never run", verdict.job),
    });
    forecast::Verdict {
        starts_now: one.outcome == Outcome::Starts,
        starts_in_s: one.starts_in_s.map(Number::of),
        why: one.why.clone(),
        others_waiting: one.others_waiting as u32,
        gpus: gpus.collect(),
        share: Number::of(
            one.runs.as_ref().and_then(|r| r.share_percent).unwrap_or_default() / 100.0,
        ),
        slowdown: one.runs.as_ref().map(|runs| runs.slowdown.into()),
        roommates: one
            .roommates
            .iter()
            .map(|other| Cost {
                job: other.job.clone(),
                before: other.before.map(Into::into),
                after: other.after.into(),
            })
            .collect(),
        others: one.others.iter().cloned().chain(others).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(job: &str, outcome: Outcome) -> Verdict {
        Verdict {
            job: job.into(),
            gpus: 1,
            outcome,
            starts_in_s: None,
            why: None,
            others_waiting: 2,
            places: Vec::new(),
            runs: None,
            roommates: Vec::new(),
            others: vec!["ml/x is evicted".into()],
        }
    }

    #[test]
    fn the_page_hears_of_all_pods_of_a_manifest() {
        let place = what_if::Place { node: "b".into(), gpus: vec![0, 3] };
        let one = Verdict { places: vec![place], ..verdict("ml/a-0", Outcome::Starts) };
        let all = [one, verdict("ml/a-1", Outcome::Waits), verdict("ml/a-2", Outcome::Never)];
        let first = BTreeMap::from([("a".to_string(), 0), ("b".to_string(), 8)]);
        let told = told(&all, &first);
        assert_eq!((told.starts_now, told.gpus), (true, vec![GpuIdx(8), GpuIdx(11)]));
        let others = ["ml/x is evicted", "ml/a-1 would wait", "ml/a-2 could never run"];
        assert_eq!(told.others, others);
    }
}
