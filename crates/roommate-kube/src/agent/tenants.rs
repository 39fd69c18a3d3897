//! The pods of the node that use its devices: what is assigned to each, what the machine was told
//! of it, and what is in force.

use super::notes::Notes;
use super::places::{OfPod, Places};
use super::{LOOK_EVERY, container_of};
use crate::assignment::{Applied, Assignment};
use crate::event::Says;
use crate::exposition::Page;
use crate::names;
use crate::objects::Pod;
use crate::request::Request;
use roommate_agent::machine::{Guest, Machine, Order, Program, Report, Start};
use roommate_agent::protocol::front::{FrontSpec, Objective, ServerSpec};
use roommate_core::event::{Placement, Sample, Served};
use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::job::{Class, Overrides};
use roommate_core::knobs::Knobs;
use roommate_core::number::Number32;
use roommate_core::reason::Reason;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How often what was measured of a pod is written, at most.
const MEASURED_EVERY: Duration = Duration::from_secs(2);
/// How often a pod is told that it is held back, at most.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// A pod that uses devices of the node.
#[expect(clippy::struct_excessive_bools, reason = "each says something else of one pod")]
struct Known {
    pod: Pod,
    of: OfPod,
    assignment: Option<Assignment>,
    /// The id of its container that runs, as its runtime names it.
    container: Option<String>,
    job: JobIdx,
    /// The container of which the machine takes care, and what it was told.
    attached: Option<(String, Assignment)>,
    /// What the machine carries out, and what it has put into force.
    carries_out: Option<Applied>,
    in_force: Option<Applied>,
    dismissed: bool,
    /// Whether something went wrong that was told.
    told_trouble: bool,
    sample: Option<Sample>,
    is_new_sample: bool,
    sampled: Option<Instant>,
    /// When it was told last that it is held back.
    told_held: Option<Instant>,
    held_back: bool,
    served: Served,
    /// When it was told last that it misses its objective.
    told_late: Option<Instant>,
    /// The pods on its devices of which it was told.
    beside: BTreeSet<String>,
}

/// All of them.
pub(super) struct Tenants {
    resource: String,
    pods: BTreeMap<String, Known>,
    by_job: BTreeMap<JobIdx, String>,
    next: u32,
    dirty: BTreeSet<String>,
    /// Pods whose containers are not there yet, and when they were looked for last.
    waiting: BTreeSet<String>,
    looked: Option<Instant>,
}

/// What metrics say besides.
pub(super) struct View<'a> {
    pub(super) node: &'a str,
    pub(super) gpus: u16,
    pub(super) tier: String,
    pub(super) registrations: u64,
    pub(super) unhealthy: usize,
}

impl Tenants {
    pub(super) fn new(resource: &str) -> Self {
        Self {
            resource: resource.into(),
            pods: BTreeMap::new(),
            by_job: BTreeMap::new(),
            next: 0,
            dirty: BTreeSet::new(),
            waiting: BTreeSet::new(),
            looked: None,
        }
    }

    /// A pod of the node is new or has changed.
    pub(super) fn observe(&mut self, pod: Pod) {
        let Some(container) = container_of(&pod, &self.resource) else { return };
        let uid = pod.uid().to_string();
        let next = JobIdx(self.next);
        let known = self.pods.entry(uid.clone()).or_insert_with(|| {
            let (namespace, name) = (pod.namespace().into(), pod.name().into());
            Known {
                of: OfPod { namespace, pod: name, container },
                pod: Pod::default(),
                assignment: None,
                container: None,
                job: next,
                attached: None,
                carries_out: None,
                in_force: None,
                dismissed: false,
                told_trouble: false,
                sample: None,
                is_new_sample: false,
                sampled: None,
                told_held: None,
                held_back: false,
                served: Served::default(),
                told_late: None,
                beside: BTreeSet::new(),
            }
        });
        if known.job == next {
            self.next += 1;
            self.by_job.insert(next, uid.clone());
        }
        known.container = known.running_container(&pod);
        if let Some(read) = Assignment::of(&pod) {
            // What an older scheduler wrote late is not obeyed.
            let newest = known.assignment.as_ref().map(Assignment::applied);
            if newest <= Some(read.applied()) {
                known.assignment = Some(read);
            }
        }
        known.in_force = known.in_force.max(Applied::of(&pod));
        known.pod = pod;
        self.dirty.insert(uid);
    }

    /// A pod is gone.
    pub(super) fn gone(&mut self, uid: &str, machine: &mut Machine) {
        if let Some(known) = self.pods.remove(uid) {
            self.by_job.remove(&known.job);
            machine.detach(known.job);
        }
        self.dirty.remove(uid);
        self.waiting.remove(uid);
    }

    /// Pods that are known and are not among these.
    pub(super) fn not_among(&self, all: &BTreeSet<String>) -> Vec<String> {
        self.pods.keys().filter(|uid| !all.contains(*uid)).cloned().collect()
    }

    /// Whether a container is one of a pod that is known.
    pub(super) fn has(&self, of: &OfPod) -> bool {
        self.pods.values().any(|known| known.of == *of)
    }

    /// Whether there are containers to look for.
    pub(super) fn are_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// What was decided for the pod of a container that is about to start; none as long as nothing
    /// is known of it.
    pub(super) fn assigned(&self, of: &OfPod) -> Result<Option<(JobIdx, Start)>, String> {
        let mut all = self.pods.values().filter(|k| k.of == *of && !k.pod.has_ended());
        let Some(known) = all.find(|k| k.assignment.is_some()) else { return Ok(None) };
        let Some(assignment) = &known.assignment else { return Ok(None) };
        known.start(assignment, &self.resource).map(|start| Some((known.job, start)))
    }

    /// Has the machine do what was assigned, for all pods that changed and all that wait.
    pub(super) fn reconcile(
        &mut self,
        machine: &mut Machine,
        places: &Places,
        notes: &mut Notes,
        told: &mut dyn FnMut(&str),
    ) {
        let mut due = std::mem::take(&mut self.dirty);
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            self.looked = Some(Instant::now());
            due.append(&mut self.waiting);
        }
        for uid in due {
            let Some(known) = self.pods.get_mut(&uid) else { continue };
            match known.reconcile(&self.resource, machine, places, notes) {
                Ok(true) => {}
                Ok(false) => {
                    self.waiting.insert(uid);
                }
                Err(why) => {
                    if !std::mem::replace(&mut known.told_trouble, true) {
                        told(&format!("{}/{}: {why}", known.of.namespace, known.of.pod));
                    }
                }
            }
        }
    }

    /// What the machine reports.
    pub(super) fn reported(&mut self, report: &Report, notes: &mut Notes) {
        let (job, kind) = match *report {
            Report::Started { job, .. } | Report::Stopped { job, .. } | Report::Tuned(job) => {
                (job, Told::InForce)
            }
            Report::Sampled { job, sample } => (job, Told::Sample(sample)),
            Report::Served { job, served } => (job, Told::Served(served)),
            Report::Noted { job, why } => (job, Told::Held(why)),
            _ => return,
        };
        let names = |job: JobIdx| self.by_job.get(&job).cloned().unwrap_or_default();
        let why_text = match &kind {
            Told::Held(why) => {
                let name = |job| self.pods.get(&names(job)).map_or(String::new(), |k| k.of.shown());
                why.describe(&name)
            }
            _ => String::new(),
        };
        let Some(known) = self.by_job.get(&job).and_then(|uid| self.pods.get_mut(uid)) else {
            return;
        };
        match kind {
            Told::InForce => known.in_force = known.carries_out.take().max(known.in_force),
            Told::Sample(sample) => (known.sample, known.is_new_sample) = (Some(sample), true),
            Told::Served(served) => {
                known.served = known.served.and(served);
                // A window lasts for a second.
                let load = served.requests as f32 / served.windows.max(1) as f32;
                let sample = Sample {
                    load_rps: Number32::of(load),
                    p99_us: served.p99_us,
                    ..known.sample.unwrap_or_default()
                };
                (known.sample, known.is_new_sample) = (Some(sample), true);
                known.tell_late(served, notes);
            }
            Told::Held(why) => {
                known.held_back = matches!(why, Reason::HeldBackFor(_));
                let now = Instant::now();
                let silent = |at: Instant| now.duration_since(at) < TOLD_EVERY;
                if known.held_back && !known.told_held.is_some_and(silent) {
                    known.told_held = Some(now);
                    let (reason, action) = ("HeldBack", "Sharing");
                    let says = Says { warns: false, reason, action, note: &why_text };
                    notes.event(&known.pod, says);
                }
            }
        }
    }

    /// The places of pods, and the devices that each was assigned.
    pub(super) fn held(&self, places: &Places) -> Vec<(Vec<String>, Vec<u16>)> {
        let of = |known: &Known| {
            let given = places.of(&known.of).filter(|_| !known.pod.has_ended())?;
            Some((given.places.clone(), known.assignment.as_ref()?.gpus.clone()))
        };
        self.pods.values().filter_map(of).collect()
    }

    /// Tells pods who shares their devices with them, when that has changed.
    fn tell_company(&mut self, notes: &mut Notes) {
        let here: Vec<(String, Vec<u16>)> = self
            .pods
            .values()
            .filter_map(|k| Some((k.of.shown(), k.attached.as_ref()?.1.gpus.clone())))
            .collect();
        for known in self.pods.values_mut() {
            let Some((_, assignment)) = &known.attached else { continue };
            let own = known.of.shown();
            let near = |(name, gpus): &&(String, Vec<u16>)| {
                *name != own && gpus.iter().any(|gpu| assignment.gpus.contains(gpu))
            };
            let beside: BTreeSet<String> =
                here.iter().filter(near).map(|(name, _)| name.clone()).collect();
            if beside == known.beside {
                continue;
            }
            let (reason, note) = if beside.is_empty() {
                ("Isolated", "has its GPUs for itself again".to_string())
            } else {
                let names: Vec<&str> = beside.iter().map(String::as_str).collect();
                ("CoLocated", format!("shares its GPUs with {}", names.join(", ")))
            };
            let says = Says { warns: false, reason, action: "Sharing", note: &note };
            notes.event(&known.pod, says);
            known.beside = beside;
        }
    }

    /// Has written what pods do not say yet.
    pub(super) fn note(&mut self, notes: &mut Notes) {
        self.tell_company(notes);
        let now = Instant::now();
        for (uid, known) in &mut self.pods {
            if known.pod.has_ended() {
                continue;
            }
            if let Some(applied) = known.in_force
                && Applied::of(&known.pod) < Some(applied)
            {
                let text = serde_json::to_string(&applied).unwrap_or_default();
                notes.annotate(uid, &known.pod, names::APPLIED, text);
            }
            let early = known.sampled.is_some_and(|at| now.duration_since(at) < MEASURED_EVERY);
            if known.is_new_sample && !early {
                (known.is_new_sample, known.sampled) = (false, Some(now));
                let text = known.sample.and_then(|s| serde_json::to_string(&s).ok());
                notes.annotate(uid, &known.pod, names::MEASURED, text.unwrap_or_default());
            }
        }
    }

    /// Metrics in the text format of Prometheus.
    pub(super) fn metrics(&self, view: &View<'_>) -> String {
        let mut page = Page::default();
        let node = view.node;
        page.gauge("roommate_build_info", "The version.")
            .add(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
        page.gauge("roommate_node_gpus", "Devices of the node, and how shares are enforced.")
            .add(&[("node", node), ("tier", &view.tier)], f64::from(view.gpus));
        page.gauge("roommate_node_unhealthy_gpus", "Devices of the node that cannot be used.")
            .add(&[("node", node)], view.unhealthy as f64);
        page.counter("roommate_registrations_total", "Registrations at the kubelet.")
            .add(&[("node", node)], view.registrations as f64);
        let families: [(&str, bool, &str, Value); 8] = [
            ("roommate_tenant_share_ratio", false, "Promised part of each of its devices.", |k| {
                let knobs = k.attached.as_ref()?.1.knobs;
                Some(f64::from(knobs.sm_permille) / 1e3)
            }),
            (
                "roommate_tenant_limit_ratio",
                false,
                "Most that it may use of each of its devices.",
                |k| Some(f64::from(k.attached.as_ref()?.1.knobs.sm_most_permille) / 1e3),
            ),
            ("roommate_tenant_suspended", false, "Whether it stands still.", |k| {
                Some(f64::from(u8::from(k.attached.as_ref()?.1.suspended)))
            }),
            ("roommate_tenant_step_seconds", false, "Seconds of its last steps.", |k| {
                Some(k.sample?.step_s.get()).filter(|s| *s > 0.0)
            }),
            ("roommate_tenant_held_back", false, "Whether it is held back for a service.", |k| {
                k.attached.as_ref().map(|_| f64::from(u8::from(k.held_back)))
            }),
            ("roommate_service_requests_total", true, "Requests that were answered.", |k| {
                (k.served.windows > 0).then_some(k.served.requests as f64)
            }),
            ("roommate_service_late_requests_total", true, "Requests over the objective.", |k| {
                (k.served.windows > 0).then_some(k.served.late as f64)
            }),
            ("roommate_service_p99_seconds", false, "Latency of 99 of 100 requests lately.", |k| {
                (k.served.windows > 0).then_some(f64::from(k.sample?.p99_us) / 1e6)
            }),
        ];
        for (name, counts, help, value) in families {
            let mut family = if counts { page.counter(name, help) } else { page.gauge(name, help) };
            for known in self.pods.values() {
                let Some(value) = value(known) else { continue };
                let OfPod { namespace, pod, container } = &known.of;
                let gpus = known.attached.iter().flat_map(|(_, a)| &a.gpus);
                let gpus: Vec<String> = gpus.map(ToString::to_string).collect();
                let labels = [
                    ("node", node),
                    ("namespace", namespace),
                    ("pod", pod),
                    ("container", container),
                    ("gpu", &gpus.join(",")),
                ];
                family.add(&labels, value);
            }
        }
        page.text()
    }
}

/// The value of a metric of a pod, where it has one.
type Value = fn(&Known) -> Option<f64>;

/// What a report says of a pod.
enum Told {
    InForce,
    Sample(Sample),
    Served(Served),
    Held(Reason),
}

impl Known {
    /// The id of its container that asks for devices, if that runs.
    fn running_container(&self, pod: &Pod) -> Option<String> {
        let status = pod.status.as_ref()?;
        let its = status.container_statuses.iter().find(|c| c.name == self.of.container)?;
        let id = its.container_id.as_deref()?;
        its.state.as_ref()?.running.as_ref()?;
        // `containerd://0123…`
        Some(id.rsplit('/').next().unwrap_or(id).into())
    }

    /// Has the machine do what is assigned. False if its container is to be looked for again.
    fn reconcile(
        &mut self,
        resource: &str,
        machine: &mut Machine,
        places: &Places,
        notes: &mut Notes,
    ) -> Result<bool, String> {
        if self.pod.has_ended() {
            if self.attached.take().is_some() {
                machine.detach(self.job);
            }
            return Ok(true);
        }
        let is_leaving = self.pod.metadata.deletion_timestamp.is_some();
        let (Some(assignment), Some(container)) = (&self.assignment, &self.container) else {
            return Ok(true);
        };
        if is_leaving && self.attached.is_some() {
            if !std::mem::replace(&mut self.dismissed, true) {
                machine.dismiss(self.job);
            }
            return Ok(true);
        }
        match &self.attached {
            Some((attached, told)) if attached == container => {
                if told.applied() == assignment.applied() {
                    return Ok(true);
                }
                let (told, assignment) = (told.clone(), assignment.clone());
                let start = self.start(&assignment, resource)?;
                self.attached = Some((container.clone(), assignment.clone()));
                self.change(&told, &assignment, start, machine);
                for (reason, note) in changes(&told.knobs, &assignment.knobs) {
                    let says = Says { warns: false, reason, action: "Tuning", note: &note };
                    notes.event(&self.pod, says);
                }
            }
            _ => {
                let Some(given) = places.of(&self.of) else {
                    return Err("its places were given by an agent that is gone".into());
                };
                let start = self.start(assignment, resource)?;
                let guest = Guest {
                    container: container.clone(),
                    token: given.token.clone(),
                    // One that an earlier agent suspended has to go on to be able to end.
                    suspended: assignment.suspended && !is_leaving,
                    env: given.env.clone(),
                };
                self.carries_out = Some(assignment.applied());
                if !machine.attach(self.job, &start, guest).map_err(|e| e.to_string())? {
                    return Ok(false);
                }
                self.attached = Some((container.clone(), assignment.clone()));
                if is_leaving {
                    self.dismissed = true;
                    machine.dismiss(self.job);
                }
            }
        }
        Ok(true)
    }

    /// Has the machine go from one assignment to another.
    fn change(&mut self, from: &Assignment, to: &Assignment, start: Start, machine: &mut Machine) {
        self.carries_out = Some(to.applied());
        match (from.suspended, to.suspended) {
            (false, true) => machine.apply(Order::Suspend(self.job)),
            (true, false) => machine.apply(Order::Start(self.job, Box::new(start))),
            (false, false) if from.knobs != to.knobs => {
                machine.apply(Order::Tune(self.job, to.knobs));
            }
            // Nothing is to be done.
            _ => self.in_force = self.carries_out.take(),
        }
    }

    /// Tells a service that it misses its objective, now and then.
    fn tell_late(&mut self, served: Served, notes: &mut Notes) {
        let now = Instant::now();
        let silent = self.told_late.is_some_and(|at| now.duration_since(at) < TOLD_EVERY);
        if served.over == 0 || silent {
            return;
        }
        self.told_late = Some(now);
        let Served { late, requests, p99_us, .. } = served;
        let note = format!(
            "{late} of {requests} requests were later than its objective allows; 99 of 100 took \
             at most {:.1} ms",
            f64::from(p99_us) / 1e3
        );
        let says = Says { warns: true, reason: "SLOAtRisk", action: "Serving", note: &note };
        notes.event(&self.pod, says);
    }

    /// The pod as a job of the machine.
    fn start(&self, assignment: &Assignment, resource: &str) -> Result<Start, String> {
        let request = Request::of(&self.pod, resource)?;
        let program = Program {
            id: self.job.0,
            name: self.of.shown(),
            words: Vec::new(),
            workdir: "/".into(),
            env: BTreeMap::new(),
            host_mib: 0,
            user: None,
            checkpoint: None,
            mem_mib: request.knobs.mem_mib,
            usual_mib: None,
            sdk: false,
            tunable: request.batch.is_some(),
            service: (request.class == Class::Service).then(|| front_of(&self.of, &request)),
        };
        let gpus = assignment.gpus.iter().map(|n| GpuIdx(u32::from(*n))).collect();
        let place = Placement { gpus, knobs: assignment.knobs };
        Ok(Start { program, place, attempt: 1, done: 0.0, user: Overrides::default() })
    }
}

/// What of a pod's knobs was changed while it runs, for people.
fn changes(from: &Knobs, to: &Knobs) -> Vec<(&'static str, String)> {
    let percent = |permille: u16| format!("{} %", f64::from(permille) / 10.0);
    let batch = |size: u32| if size == 0 { "its own".into() } else { size.to_string() };
    let mut all = Vec::new();
    if from.batch != to.batch {
        let note = format!("batch size {}, was {}", batch(to.batch), batch(from.batch));
        all.push(("BatchSizeChanged", note));
    }
    let share = |k: &Knobs| (k.sm_permille, k.sm_most_permille);
    if share(from) != share(to) {
        let text = |k: &Knobs| {
            let (promised, most) = (percent(k.sm_permille), percent(k.sm_most_permille));
            format!("{promised} promised, at most {most}")
        };
        all.push(("ShareResized", format!("{}; was {}", text(to), text(from))));
    }
    all
}

/// What the machine needs to know of a service. Its front runs in the pod.
fn front_of(of: &OfPod, request: &Request) -> FrontSpec {
    let ms = request.slo.map_or(f64::MAX, |slo| f64::from(slo.p99_us) / 1e3);
    FrontSpec {
        name: of.shown(),
        model: of.pod.clone(),
        listen: ([127, 0, 0, 1], 0).into(),
        objective: Objective { quantile: 0.99, ms },
        max_batch: request.max_batch.unwrap_or(1),
        fill_ms: None,
        queue: 1,
        server: ServerSpec::Sdk {},
    }
}

impl OfPod {
    /// Its pod as people name it.
    fn shown(&self) -> String {
        format!("{}/{}", self.namespace, self.pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_told_which_knobs_were_changed() {
        let own = Knobs { sm_permille: 0, ..Knobs::WHOLE };
        let tuned = Knobs { batch: 96, pace_permille: 500, ..own };
        assert_eq!(
            changes(&own, &tuned),
            [("BatchSizeChanged", "batch size 96, was its own".to_string())]
        );
        let confined = Knobs { sm_permille: 305, sm_most_permille: 400, ..own };
        let note = "30.5 % promised, at most 40 %; was 0 % promised, at most 100 %";
        assert_eq!(changes(&own, &confined), [("ShareResized", note.to_string())]);
        assert!(changes(&own, &own).is_empty());
    }
}
