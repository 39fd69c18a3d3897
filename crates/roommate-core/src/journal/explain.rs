//! Explain: the history of one job, folded from a journal.

use crate::event::{Action, Event, Placement, Served};
use crate::idx::{GpuIdx, IdxVec, JobIdx};
use crate::job::Class;
use crate::journal::{Head, JobLine, Observer, StepView};
use crate::knobs::Knobs;
use crate::reason::Reason;
use crate::time::Time;

/// An entry in the history of the job.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Moment {
    /// When it happened.
    pub at: Time,
    /// The event as a sentence.
    pub what: String,
}

/// Folds a journal into the history of the job with one name.
#[derive(Debug)]
pub struct Explain {
    wanted: String,
    /// The user whose jobs may be named; `None` = all may.
    only_of: Option<String>,
    job: Option<JobIdx>,
    names: IdxVec<JobIdx, String>,
    /// First GPU of each node.
    nodes: Vec<u32>,
    /// Names of the nodes, where they have any.
    node_names: Vec<String>,
    gpus: u32,
    waiting: u32,
    held: IdxVec<JobIdx, u16>,
    busy: u32,
    /// For a service: whether its last report had windows over its SLO.
    missed: Option<bool>,
    /// Whether it is a service.
    serves: bool,
    owner: Option<String>,
    /// The history so far.
    pub moments: Vec<Moment>,
}

impl Explain {
    /// The history of the job with this name.
    pub fn new(name: &str) -> Self {
        Self {
            wanted: name.into(),
            only_of: None,
            job: None,
            names: IdxVec::new(),
            nodes: Vec::new(),
            node_names: Vec::new(),
            gpus: 0,
            waiting: 0,
            held: IdxVec::new(),
            busy: 0,
            missed: None,
            serves: false,
            owner: None,
            moments: Vec::new(),
        }
    }

    /// Knows only the jobs of this user; those of others have no name.
    #[must_use]
    pub fn only_of(self, owner: &str) -> Self {
        Self { only_of: Some(owner.into()), ..self }
    }

    /// Whether the journal has a job with this name.
    pub fn found(&self) -> bool {
        self.job.is_some()
    }

    /// Names of jobs in the journal that are similar to the wanted one.
    pub fn similar(&self) -> impl Iterator<Item = &str> {
        let wanted = self.wanted.to_lowercase();
        let alike =
            move |n: &&String| n.to_lowercase().contains(&wanted) && n.as_str() != OF_ANOTHER;
        self.names.iter().filter(alike).map(String::as_str)
    }

    fn tell(&mut self, at: Time, what: String) {
        if self.moments.last().is_none_or(|m| m.what != what) {
            self.moments.push(Moment { at, what });
        }
    }

    /// `node 3: GPUs 0 1 2 3; node 4: GPU 1`.
    fn place(&self, p: &Placement) -> String {
        let mut text = String::new();
        let mut rest: &[GpuIdx] = &p.gpus;
        while let Some(first) = rest.first() {
            let node = self.nodes.partition_point(|n| *n <= first.0) - 1;
            let end = self.nodes.get(node + 1).copied().unwrap_or(u32::MAX);
            let here = rest.iter().take_while(|g| g.0 < end).count();
            let numbers: Vec<String> =
                rest[..here].iter().map(|g| (g.0 - self.nodes[node]).to_string()).collect();
            let plural = if here == 1 { "GPU" } else { "GPUs" };
            let semicolon = if text.is_empty() { "" } else { "; " };
            let name = self.node_names.get(node).cloned().unwrap_or_else(|| node.to_string());
            text += &format!("{semicolon}node {name}: {plural} {}", numbers.join(" "));
            rest = &rest[here..];
        }
        text + &share(p.knobs)
    }

    fn hold(&mut self, job: JobIdx, gpus: u16) {
        let was = std::mem::replace(&mut self.held[job], gpus);
        self.busy = self.busy + u32::from(gpus) - u32::from(was);
    }

    /// Adds a fact of the job; `by` is the user whose request it was.
    fn own_fact(&mut self, at: Time, fact: &Event, by: Option<&str>) {
        match fact {
            Event::Submitted(_) => {
                let idle = self.gpus.saturating_sub(self.busy);
                let others = self.waiting - 1;
                let owner = self.owner.as_deref();
                let by = by_whom(by.or(owner))
                    + &owner
                        .filter(|o| by.is_some_and(|by| by != *o))
                        .map_or(String::new(), |owner| format!(" for {owner}"));
                self.tell(
                    at,
                    format!("submitted{by}; GPUs not held: {idle}, other jobs waiting: {others}"),
                );
            }
            Event::Started(_) if self.serves => self.tell(at, "answers requests".into()),
            Event::Started(_) => self.tell(at, "makes progress".into()),
            Event::Stopped { done, .. } => {
                self.tell(at, format!("stopped with {done:.0} steps done"));
            }
            Event::Finished(_) => self.tell(at, "finished".into()),
            Event::Withdrawn(_) => self.tell(at, "gone until it is submitted again".into()),
            Event::Cancelled(_) if self.serves => self.tell(at, "ended".into()),
            Event::Cancelled(_) => {
                self.tell(at, format!("cancelled by {}", by.unwrap_or(ITS_USER)));
            }
            Event::Failed { reason, done, .. } => {
                let reason = describe(reason, &self.names);
                self.tell(at, format!("failed: {reason}; {done:.0} steps survive"));
            }
            Event::Tuned(_) => self.tell(at, "runs with its new settings".into()),
            Event::Served { served, .. } => self.own_account(at, served),
            Event::Noted { reason, .. } => {
                let what = describe(reason, &self.names);
                self.tell(at, what);
            }
            Event::Held { .. } | Event::Resized { .. } => self.tell(at, set_by_user(fact, by)),
            Event::Sampled { .. } => {}
            Event::NodeUp(_) | Event::NodeDown(_) | Event::NodeRoom { .. } => {}
        }
    }

    /// Adds an entry when a service begins to miss its SLO and when it keeps it again.
    fn own_account(&mut self, at: Time, served: &Served) {
        let missed = served.over > 0;
        let ms = |us: u32| f64::from(us) / 1e3;
        let Served { windows, over, requests, late, p99_us, worst_us, .. } = *served;
        let again = self.missed == Some(missed);
        self.missed = Some(missed);
        if again {
            return;
        }
        let what = if requests == 0 {
            format!("keeps its objective: no requests in {windows} windows")
        } else if missed {
            format!(
                "misses its objective in {over} of {windows} windows: {late} of {requests} \
                 requests late, p99 {:.1} ms, at worst {:.1} ms",
                ms(p99_us),
                ms(worst_us)
            )
        } else {
            format!(
                "keeps its objective: p99 {:.1} ms over {requests} requests in {windows} windows",
                ms(p99_us)
            )
        };
        self.tell(at, what);
    }
}

impl Observer for Explain {
    fn head(&mut self, head: &Head) {
        self.gpus = head.cluster.gpus();
        self.node_names.clone_from(&head.nodes);
        let mut first = 0;
        for group in &head.cluster.groups {
            for _ in 0..group.count {
                self.nodes.push(first);
                first += u32::from(group.gpus);
            }
        }
    }

    fn job(&mut self, line: &JobLine) {
        let known = self.only_of.is_none() || self.only_of == line.owner;
        if known && line.name == self.wanted && self.job.is_none() {
            self.job = Some(line.idx);
            self.serves = line.spec.class == Class::Service;
            self.owner.clone_from(&line.owner);
        }
        self.names.push(if known { line.name.clone() } else { OF_ANOTHER.into() });
        self.held.push(0);
    }

    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            let job = match fact {
                Event::Submitted(job) => {
                    self.waiting += 1;
                    *job
                }
                Event::Finished(job)
                | Event::Cancelled(job)
                | Event::Withdrawn(job)
                | Event::Failed { job, .. } => {
                    let waited = matches!(fact, Event::Cancelled(_) | Event::Withdrawn(_));
                    if waited && self.held[*job] == 0 {
                        self.waiting = self.waiting.saturating_sub(1);
                    }
                    self.hold(*job, 0);
                    *job
                }
                Event::Started(job) | Event::Tuned(job) => *job,
                Event::Stopped { job, .. } | Event::Sampled { job, .. } => *job,
                Event::Served { job, .. } | Event::Noted { job, .. } => *job,
                Event::Held { job, .. } | Event::Resized { job, .. } => *job,
                Event::NodeUp(_) | Event::NodeDown(_) | Event::NodeRoom { .. } => continue,
            };
            if Some(job) == self.job {
                self.own_fact(step.at, fact, step.by);
            }
        }
        let own = self.job;
        for note in step.notes.iter().filter(|n| Some(n.job) == own) {
            let what = describe(&note.reason, &self.names);
            self.tell(step.at, what);
        }
        for action in step.actions {
            self.action(step.at, action);
        }
    }
}

impl Explain {
    fn action(&mut self, at: Time, action: &Action) {
        let job = action.job();
        match action {
            Action::Start(_, p) => {
                self.waiting = self.waiting.saturating_sub(1);
                self.hold(job, p.gpus.len() as u16);
            }
            Action::Move(_, p) => self.hold(job, p.gpus.len() as u16),
            Action::Stop(_) | Action::Suspend(_) => {
                self.waiting += 1;
                self.hold(job, 0);
            }
            Action::Reject(..) => self.waiting = self.waiting.saturating_sub(1),
            Action::Tune(..) => {}
        }
        if Some(job) != self.job {
            return;
        }
        let what = match action {
            Action::Start(_, p) => format!("started on {}", self.place(p)),
            Action::Move(_, p) => format!("moved to {}", self.place(p)),
            Action::Suspend(_) => "suspended: its process stays in host memory".into(),
            Action::Stop(_) => "asked to leave its GPUs".into(),
            Action::Tune(_, knobs) => {
                format!("asked to run with {}{}", batch(*knobs), share(*knobs))
            }
            Action::Reject(_, reason) => format!("rejected: {}", describe(reason, &self.names)),
        };
        self.tell(at, what);
    }
}

/// A job that the reader may not know.
const OF_ANOTHER: &str = "a job of another user";

/// A user whose name the journal does not have.
const ITS_USER: &str = "its user";

/// ` by alice`, or nothing where it is not known who.
pub fn by_whom(by: Option<&str>) -> String {
    by.map_or(String::new(), |by| format!(" by {by}"))
}

/// What a user set, in words: `held by alice`. Empty for other facts.
pub fn set_by_user(fact: &Event, by: Option<&str>) -> String {
    let by = by.unwrap_or(ITS_USER);
    match *fact {
        Event::Held { held: true, .. } => format!("held by {by}"),
        Event::Held { held: false, .. } => format!("released by {by}"),
        Event::Resized { batch, share_permille, .. } => {
            let batch = batch.map(|b| match b {
                0 => "the policy's batch size".to_string(),
                b => format!("batch {b}"),
            });
            let share = share_permille.map(|s| match s {
                0 => "the policy's share".to_string(),
                s => format!("at most {} % of each GPU", f64::from(s) / 10.0),
            });
            let set: Vec<String> = batch.into_iter().chain(share).collect();
            format!("resized by {by}: {}", set.join(", "))
        }
        _ => String::new(),
    }
}

/// `batch 256`.
fn batch(knobs: Knobs) -> String {
    match knobs.batch {
        0 => "its own batch".into(),
        batch => format!("batch {batch}"),
    }
}

/// Its share of each of its GPUs, where that is not the whole: `, 50 % of each`.
fn share(knobs: Knobs) -> String {
    let percent = |permille: u16| f64::from(permille) / 10.0;
    let mut text = match knobs.sm_permille {
        Knobs::SM_ALL => String::new(),
        0 => ", sharing them without a guaranteed part".into(),
        sm => format!(", {} % of each", percent(sm)),
    };
    if knobs.pace_permille < Knobs::PACE_FULL {
        text += &format!(", at most at {} % of its speed", percent(knobs.pace_permille));
    }
    if knobs.floor_permille > 0 {
        text += &format!(", guaranteed {} % of its speed", percent(knobs.floor_permille));
    }
    text
}

fn describe(reason: &Reason, names: &IdxVec<JobIdx, String>) -> String {
    reason.describe(&|j| names[j].clone())
}
