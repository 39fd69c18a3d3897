//! What a cluster is like now, in figures: for metrics.

use crate::ledger::Held;
use crate::names;
use crate::request::USUAL_QUEUE;
use crate::world::{Known, World};
use roommate_core::event::Sample;
use roommate_core::job::Phase;
use roommate_core::number::Number;
use std::collections::BTreeMap;

/// Why pods are not on a node; kube-scheduler tells the same apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pending {
    /// It will be decided soon.
    Active,
    /// It could not be bound, and is tried again after a pause.
    Backoff,
    /// There is no room for it, its gang is not complete, or it asks for what cannot be.
    Unschedulable,
    /// Its scheduling gates hold it back.
    Gated,
}

impl Pending {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Active, Self::Backoff, Self::Unschedulable, Self::Gated];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Backoff => "backoff",
            Self::Unschedulable => "unschedulable",
            Self::Gated => "gated",
        }
    }
}

/// A queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueFigures {
    /// Its pods that are not on a node.
    pub pending: u64,
    /// Its pods on GPUs.
    pub placed: u64,
    /// What is promised to them, in GPUs.
    pub promised_gpus: f64,
}

/// A node with GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFigures {
    /// Its name.
    pub node: String,
    /// Its model of GPUs.
    pub model: String,
    /// Its GPUs; 0 while it is not ready.
    pub gpus: u16,
    /// GPUs with a pod.
    pub in_use: usize,
    /// GPUs with several pods.
    pub shared: usize,
    /// What is promised to pods, in GPUs.
    pub promised_gpus: f64,
    /// Memory of all its GPUs, MiB; 0 = not known.
    pub mem_mib: u64,
    /// Memory that is promised to pods, MiB.
    pub promised_mib: u64,
}

/// A pod on GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantFigures {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// Its GPUs there.
    pub gpus: Vec<u16>,
    /// Promised part of each.
    pub share: f64,
    /// The most of each that it may use.
    pub limit: f64,
    /// Promised memory of each, MiB; 0 = none.
    pub mem_mib: u32,
    /// Whether it stands still, its memory on the host.
    pub suspended: bool,
    /// Seconds of a step, as measured last.
    pub step_s: Option<f64>,
    /// How much longer that is than alone, where that is known.
    pub slowdown: Option<f64>,
    /// How much longer it may be, as promised.
    pub most_slowdown: Option<f64>,
    /// The latency that 99 of 100 requests have to keep, seconds.
    pub objective_s: Option<f64>,
    /// The latency that they kept, as measured last, seconds.
    pub p99_s: Option<f64>,
    /// Requests per second, as measured last.
    pub load_rps: Option<f64>,
}

/// A cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Pods that are not on a node, by why.
    pub pending: BTreeMap<Pending, u64>,
    /// By name.
    pub queues: BTreeMap<String, QueueFigures>,
    /// By name.
    pub nodes: Vec<NodeFigures>,
    /// By namespace and name.
    pub tenants: Vec<TenantFigures>,
}

impl World {
    /// What the cluster is like now.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures { nodes: self.node_figures(), ..Figures::default() };
        let mut all: Vec<&Known> = self.pods.values().collect();
        all.sort_unstable_by_key(|known| (known.pod.namespace(), known.pod.name()));
        for known in all {
            let Some(request) = &known.request else { continue };
            let queue = known.pod.label(names::QUEUE).unwrap_or(USUAL_QUEUE);
            if known.holds()
                && let Some(tenant) = self.tenant_figures(known)
            {
                let of = figures.queues.entry(queue.into()).or_default();
                of.placed += 1;
                of.promised_gpus += tenant.share * tenant.gpus.len() as f64;
                figures.tenants.push(tenant);
            } else if known.is_alive() && known.node().is_none() {
                let why = self.why_pending(known, request.is_err());
                *figures.pending.entry(why).or_default() += 1;
                figures.queues.entry(queue.into()).or_default().pending += 1;
            }
        }
        figures
    }

    fn node_figures(&self) -> Vec<NodeFigures> {
        let of = |(name, known): (&String, &super::KnownNode)| {
            let shape = known.shape.as_ref()?;
            let held = self.ledger.node(name);
            let more_than = |n: u32| held.iter().filter(|h| h.pods > n).count();
            let promised = |what: fn(&Held) -> u64| held.iter().map(what).sum::<u64>();
            Some(NodeFigures {
                node: name.clone(),
                model: shape.model.clone(),
                gpus: if known.up { shape.healthy().count() as u16 } else { 0 },
                in_use: more_than(0),
                shared: more_than(1),
                promised_gpus: promised(|h| h.share_permille.into()) as f64 / 1000.0,
                mem_mib: u64::from(shape.mem_mib) * u64::from(shape.gpus),
                promised_mib: promised(|h| h.mem_mib),
            })
        };
        self.nodes.iter().filter_map(of).collect()
    }

    fn why_pending(&self, known: &Known, is_refused: bool) -> Pending {
        let work = known.work.and_then(|w| self.works.get(w as usize)?.as_ref());
        let is_rejected = known.work.and_then(|w| self.phase(w)) == Some(Phase::Done);
        match work {
            _ if known.is_gated() => Pending::Gated,
            _ if is_refused || is_rejected => Pending::Unschedulable,
            Some(work) if work.not_before > self.now => Pending::Backoff,
            Some(work) if work.explained.is_some() => Pending::Unschedulable,
            _ => Pending::Active,
        }
    }

    fn tenant_figures(&self, known: &Known) -> Option<TenantFigures> {
        let (node, now) = known.node().zip(known.now())?;
        let knobs = &now.knobs;
        let request = known.request.as_ref()?.as_ref().ok();
        let sample = known.pod.annotation(names::MEASURED);
        let sample = sample.and_then(|text| serde_json::from_str::<Sample>(text).ok());
        let step_s = sample.map(|s| s.step_s.get()).filter(|s| *s > 0.0);
        let positive = |v: f64| Some(v).filter(|v| *v > 0.0);
        Some(TenantFigures {
            namespace: known.pod.namespace().into(),
            pod: known.pod.name().into(),
            node: node.into(),
            gpus: now.gpus.clone(),
            share: if now.suspended { 0.0 } else { f64::from(knobs.sm_permille) / 1000.0 },
            limit: f64::from(knobs.sm_most_permille) / 1000.0,
            mem_mib: if now.suspended { 0 } else { knobs.mem_mib },
            suspended: now.suspended,
            step_s,
            slowdown: step_s.zip(self.step_alone_s(known)).map(|(now, alone)| now / alone),
            most_slowdown: request.and_then(|r| r.max_slowdown).map(Number::get),
            objective_s: request.and_then(|r| r.slo).map(|slo| f64::from(slo.p99_us) / 1e6),
            p99_s: sample.and_then(|s| positive(f64::from(s.p99_us) / 1e6)),
            load_rps: sample.and_then(|s| positive(f64::from(s.load_rps.get()))),
        })
    }

    /// Seconds of a step alone where the pod is, if that was measured or declared.
    fn step_alone_s(&self, known: &Known) -> Option<f64> {
        let state = self.part.as_ref()?.engine.state();
        let job = self.works.get(known.work? as usize)?.as_ref()?.job?;
        let gpus = &state.job(job).gpus;
        let model = state.gpu(*gpus.first()?).gpu_model;
        let is_measured = state.solo_belief(state.spec(job).profile, Some(model)).is_measured;
        Some(state.alone_step_s(job, gpus)).filter(|s| is_measured && *s > 0.0)
    }
}
