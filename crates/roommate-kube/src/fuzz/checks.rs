//! What has to hold after every operation, and at the end.

use super::{Fuzz, Held, News, SLOTS, WORK_CONSERVING, uses};
use crate::assignment::Assignment;
use crate::ledger::{Hold, Ledger, Limits};
use crate::names;
use crate::objects::{Node, Pod};
use crate::request::Request;
use crate::world::{Grant, Shape};
use roommate_core::time::Span;
use std::collections::{BTreeMap, BTreeSet};

impl Fuzz {
    /// The ledger as the objects of the server say.
    pub(super) fn truth(&self) -> Ledger {
        let mut ledger = Ledger::default();
        for node in self.api.nodes.values() {
            if let Some(shape) = Shape::of(node, names::RESOURCE) {
                let limits = Limits { gpus: shape.gpus, mem_mib: shape.mem_mib, pods: SLOTS };
                ledger.set_node(node.name(), limits);
            }
        }
        for held in self.api.pods.values().filter(|h| !h.pod.has_ended()) {
            if let (Some(node), Some(assignment)) =
                (&held.pod.spec.node_name, Assignment::of(&held.pod))
                && self.api.nodes.contains_key(node)
            {
                ledger.set(held.pod.uid(), Some(Hold::of(node, &assignment)));
            }
        }
        ledger
    }

    pub(super) fn check(&mut self) {
        let truth = self.truth();
        self.out.over_allocations += truth.over() as u64;
        if let Some(over) = truth.describe_over()
            && self.out.first.is_none()
        {
            self.out.first = Some(format!("operation {}: {over}", self.out.operations));
        }
    }

    /// Nothing may be bound beyond the quota of a queue that may not borrow.
    pub(super) fn check_quota(&mut self, bound: &Pod) {
        let Some(name) = bound.label(names::QUEUE) else { return };
        let Some(Grant { quota: Some(quota), borrows: false, .. }) = self.api.queues.get(name)
        else {
            return;
        };
        let others = self.api.pods.values().map(|h| &h.pod).filter(|pod| {
            pod.uid() != bound.uid() && pod.label(names::QUEUE) == Some(name) && uses(pod) > 0
        });
        let used = others.map(uses).sum::<u64>() + uses(bound);
        if used > *quota {
            self.out.over_quota += 1;
            let what = format!("{} was bound although {name} uses {used} of {quota}", bound.name());
            self.out.first.get_or_insert(what);
        }
    }

    /// CPU that pods on a node use, in thousandths of a core.
    pub(super) fn cpu_used(&self, node: &str) -> u64 {
        let on = |h: &&Held| h.pod.spec.node_name.as_deref() == Some(node) && !h.pod.has_ended();
        self.api.pods.values().filter(on).map(|h| h.pod.room().0).sum()
    }

    pub(super) fn check_journal(&mut self) {
        let journal = self.world.journal();
        if journal.is_empty() {
            return;
        }
        let mut replay = roommate_core::journal::replay::Replay::default();
        let read = roommate_core::journal::read(&journal[..], &mut replay);
        let wrong = match (read, replay.difference) {
            (Err(e), _) => Some(format!("the journal cannot be read: {e}")),
            (_, Some(d)) => Some(format!("the replay differs at step {}", d.step)),
            _ => None,
        };
        if let Some(wrong) = wrong {
            self.out.first.get_or_insert(wrong);
            self.out.leaks += 1;
        }
    }

    /// Nothing fails any more, and everything comes to rest: first with the quotas that there are,
    /// then without any.
    pub(super) fn settle(&mut self) {
        self.faults = false;
        self.api.wanted.clear();
        self.rest(50);
        self.calm = true;
        // Pods come and go, and others may not get more than their queues have.
        self.keeps_quotas = true;
        self.rest(150);
        self.keeps_quotas = false;
        self.api.wanted.clear();
        self.rest(50);
        let truth = self.truth();
        let starved = self.stuck(&truth, &|pod| self.has_free_queue(pod, &truth));
        self.blame(&starved, "its queue uses nothing");
        for name in std::mem::take(&mut self.api.queues).into_keys() {
            self.api.news.push_back(News::Queue(name, None));
        }
        self.rest(200);
    }

    pub(super) fn rest(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.now += Span(1_000_000);
            self.collect();
            if self.keeps_quotas {
                (0..3).for_each(|_| self.progress());
            }
            // What is bound from now on was decided for what is.
            while !self.api.news.is_empty() {
                self.tell();
            }
            self.step();
            while !self.under_way.is_empty() {
                self.answer();
                self.step();
            }
            for uid in self.api.pods.keys().cloned().collect::<Vec<_>>() {
                let held = &self.api.pods[&uid];
                if held.pod.metadata.deletion_timestamp.is_some() {
                    self.gone(&uid);
                    self.api.wanted.clear();
                } else if let Some(assignment) = Assignment::of(&held.pod) {
                    let mut pod = held.pod.clone();
                    let applied = serde_json::to_string(&assignment.applied()).unwrap_or_default();
                    let annotations = pod.metadata.annotations.get_or_insert_default();
                    if annotations.get(names::APPLIED) != Some(&applied) {
                        annotations.insert(names::APPLIED.into(), applied);
                        self.put(pod);
                    }
                }
            }
            self.check();
        }
    }

    /// Whether the queue of a pod has a quota for it and uses nothing, and whoever waits there
    /// could run.
    pub(super) fn has_free_queue(&self, pod: &Pod, truth: &Ledger) -> bool {
        let Some(name) = pod.label(names::QUEUE) else { return false };
        let quota = self.api.queues.get(name).and_then(|grant| grant.quota);
        let of = || {
            let live = self.api.pods.values().filter(|h| !h.pod.has_ended());
            live.map(|h| &h.pod).filter(|pod| pod.label(names::QUEUE) == Some(name))
        };
        let small = |pod: &Pod| {
            Request::of(pod, names::RESOURCE)
                .is_ok_and(|r| quota.is_some_and(|quota| u64::from(r.knobs.sm_permille) <= quota))
        };
        of().all(|pod| pod.spec.node_name.is_none() && small(pod))
            && of().count() as u64
                == self.stuck(truth, &|pod| pod.label(names::QUEUE) == Some(name)).len() as u64
    }

    /// Of a policy that leaves no GPU idle nobody may be stuck.
    pub(super) fn blame(&mut self, stuck: &[String], although: &str) {
        if let Some(first) = stuck.first()
            && WORK_CONSERVING.contains(&&*self.settings.policy)
        {
            self.out.leaks += stuck.len() as u64;
            self.out.first.get_or_insert(format!("{first}, and {although}"));
        }
    }

    /// Pods by themselves that wait although there is a whole GPU for them, and what they were
    /// told.
    pub(super) fn stuck(&self, truth: &Ledger, among: &dyn Fn(&Pod) -> bool) -> Vec<String> {
        // A gang keeps all its places until the last of its pods has ended.
        let live = self.api.pods.values().map(|h| &h.pod).filter(|pod| !pod.has_ended());
        let gangs = live.filter_map(|pod| Assignment::of(pod)?.gang);
        let kept: BTreeSet<(String, u16)> = gangs
            .flat_map(|gang| gang.places)
            .flat_map(|(node, gpus)| gpus.into_iter().map(move |gpu| (node.clone(), gpu)))
            .collect();
        let idle = |node: &Node, request: &Request| {
            let Some(shape) = Shape::of(node, names::RESOURCE) else { return false };
            let held = truth.node(node.name());
            let cpu = self.cpu_used(node.name());
            node.is_ready()
                && request.constraint.allows(node)
                && cpu + 4000 <= u64::from(shape.cpu_milli)
                && request.knobs.mem_mib <= shape.mem_mib
                && shape.healthy().any(|gpu| {
                    held.get(usize::from(gpu)).is_some_and(|held| held.pods == 0)
                        && !kept.contains(&(node.name().to_string(), gpu))
                })
        };
        let waits = |held: &&Held| {
            let pod = &held.pod;
            let grouped = names::GROUP_LABELS.iter().any(|l| pod.label(l).is_some());
            let gated = pod.spec.scheduling_gates.is_some();
            let Ok(request) = Request::of(pod, names::RESOURCE) else { return false };
            pod.spec.scheduler_name.as_deref() == Some(names::SCHEDULER)
                && pod.spec.node_name.is_none()
                && !(grouped || gated)
                && request.gpus == 1
                && among(pod)
                && self.api.nodes.values().any(|node| idle(node, &request))
        };
        let told = |held: &Held| {
            let why = self.told.get(held.pod.uid()).map_or("nothing", String::as_str);
            format!("{} waits although a GPU is idle for it; it was told: {why}", held.pod.name())
        };
        self.api.pods.values().filter(waits).map(told).collect()
    }

    pub(super) fn finish(&mut self) {
        let truth = self.truth();
        let uids: Vec<String> = self.api.pods.keys().cloned().collect();
        let holds = |ledger: &Ledger| -> BTreeMap<String, Hold> {
            let of = |uid: &String| Some((uid.clone(), ledger.of(uid)?.clone()));
            uids.iter().filter_map(of).collect()
        };
        let (own, real) = (holds(self.world.ledger()), holds(&truth));
        let differs = own.iter().filter(|(uid, hold)| real.get(*uid) != Some(hold)).count()
            + real.keys().filter(|uid| !own.contains_key(*uid)).count()
            + self.world.ledger().pods().saturating_sub(own.len());
        self.out.leaks += differs as u64;
        if differs > 0 {
            self.out.first.get_or_insert(format!("{differs} holds differ from the server's"));
        }
        let stuck = self.stuck(&truth, &|_| true);
        self.out.stuck = stuck.len() as u64;
        self.blame(&stuck, "no queue has a quota");
        self.check_journal();
        self.restart();
        let rebuilt = holds(self.world.ledger());
        self.out.equal_to_rebuild = rebuilt == own;
        if !self.out.equal_to_rebuild {
            self.out.first.get_or_insert("a rebuilt ledger differs".into());
        }
    }
}
