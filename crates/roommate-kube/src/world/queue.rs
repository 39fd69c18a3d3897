//! Queues: which works may go to the engine, and which wait for the quota of their queue.
//!
//! A work is *admitted* from the moment at which it may go to the engine until its pods are gone;
//! what it asks for counts against the quota of its queue all that time, whether it has its GPUs
//! already or not. A work that runs when it is seen first is admitted, whatever the quota says.
//!
//! - Within its quota a queue admits its works in the order in which they came. A work that is
//!   larger than the quota holds up none behind it.
//! - Beyond its quota a queue that may borrow admits works as long as GPUs are idle and no other
//!   queue within its quota waits for some.
//! - Once another queue does, what was borrowed and waits goes back into its line. What was
//!   borrowed and runs is evicted, the newest first, if the other one has waited for a while.
//!
//! Amounts are thousandths of a GPU: a promised share of a GPU counts as that share, everything
//! else as whole GPUs.

use crate::world::{Known, Shape, Work, World};
use roommate_core::job::Phase;
use roommate_core::number::Number;
use roommate_core::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// What an administrator grants a queue.
#[derive(Clone, Debug, PartialEq)]
pub struct Grant {
    /// Its weight, for policies that are fair to teams.
    pub weight: f64,
    /// The most that its works may use together, in thousandths of a GPU; none = no limit.
    pub quota: Option<u64>,
    /// Whether it may use more while others leave GPUs idle.
    pub borrows: bool,
}

impl Default for Grant {
    fn default() -> Self {
        Self { weight: 1.0, quota: None, borrows: false }
    }
}

/// A queue as people see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueReport {
    /// Its name.
    pub name: String,
    /// What its works hold, in thousandths of a GPU.
    pub used: u64,
    /// What it may use, in thousandths of a GPU; none = no limit.
    pub quota: Option<u64>,
    /// Pods and gangs that hold GPUs.
    pub running: u32,
    /// Pods and gangs that wait, for the quota or for GPUs.
    pub waiting: u32,
    /// Those of them that wait for the quota.
    pub held_back: u32,
}

/// When a work came: seconds as the API server says, and which it was of those seen.
pub(super) type Arrival = (i64, u64);

/// A work that may go to the engine, or did.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    work: u32,
    needs: u64,
    since: Time,
}

/// A queue, whether an administrator made it or pods just name it.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    /// What is granted; none = nobody said anything, so there is no limit.
    grant: Option<Grant>,
    admitted: BTreeMap<Arrival, Admitted>,
    /// Sum over those that are admitted.
    taken: u64,
    line: BTreeMap<Arrival, Admitted>,
}

impl Queue {
    fn quota(&self) -> Option<u64> {
        self.grant.as_ref().and_then(|g| g.quota)
    }

    fn borrows(&self) -> bool {
        self.grant.as_ref().is_some_and(|g| g.borrows)
    }

    fn fits(&self, needs: u64) -> bool {
        self.quota().is_none_or(|quota| self.taken + needs <= quota)
    }

    fn is_over(&self) -> bool {
        self.quota().is_some_and(|quota| self.taken > quota)
    }

    fn enter(&mut self, arrived: Arrival, one: Admitted) {
        self.line.remove(&arrived);
        if self.admitted.insert(arrived, one).is_none() {
            self.taken += one.needs;
        }
    }

    fn is_idle(&self) -> bool {
        self.grant.is_none() && self.admitted.is_empty() && self.line.is_empty()
    }
}

/// How often it is looked again whether a queue may borrow, or has to give back.
const LOOK_AGAIN: Span = Span(1_000_000);
/// How long a queue within its quota waits for GPUs before what others borrowed is evicted.
const RECLAIM_AFTER: Span = Span(5_000_000);
/// How long GPUs that were given back count as that, though nobody has taken them yet.
const SETTLES: Span = Span(2_000_000);

impl World {
    /// An administrator made a queue, or changed it.
    pub fn queue(&mut self, name: &str, grant: Grant) {
        let queue = self.queues.entry(name.into()).or_default();
        let weight = |grant: &Option<Grant>| grant.as_ref().map_or(1.0, |g| g.weight);
        let weighs_other = weight(&queue.grant) != grant.weight && !queue.admitted.is_empty();
        queue.grant = Some(grant);
        self.queue_look = Some(Time::ZERO);
        if weighs_other {
            self.want_part(self.now, "the weight of a queue has changed");
        }
    }

    /// A queue was deleted: what its pods use has no limit any more.
    pub fn queue_gone(&mut self, name: &str) {
        let Some(queue) = self.queues.get_mut(name) else { return };
        queue.grant = None;
        self.queue_look = Some(Time::ZERO);
    }

    /// All queues were listed anew: what is not among them is gone.
    pub fn queues_listed(&mut self, names: &BTreeSet<String>) {
        let made = self.queues.iter().filter(|(_, queue)| queue.grant.is_some());
        let gone: Vec<String> =
            made.map(|(n, _)| n.clone()).filter(|n| !names.contains(n)).collect();
        gone.iter().for_each(|name| self.queue_gone(name));
    }

    /// The queues that administrators made, by name.
    pub fn queue_reports(&self) -> Vec<QueueReport> {
        let made = self.queues.iter().filter(|(_, queue)| queue.grant.is_some());
        let report = |(name, queue): (&String, &Queue)| {
            let (used, running) = self.placed(queue);
            let held_back = queue.line.len() as u32;
            let waiting = held_back + queue.admitted.len() as u32 - running;
            let name = name.clone();
            QueueReport { name, used, quota: queue.quota(), running, waiting, held_back }
        };
        made.map(report).collect()
    }

    /// The weight of the jobs of a queue.
    pub(super) fn weight_of(&self, queue: &str) -> Number {
        let grant = self.queues.get(queue).and_then(|q| q.grant.as_ref());
        Number::of(grant.map_or(1.0, |g| g.weight))
    }

    /// Whether a work may go to the engine; if not, it is in the line of its queue from now on.
    pub(super) fn is_admitted(&mut self, w: u32, work: &Work, runs: bool) -> bool {
        let Some(request) = &work.request else { return false };
        let one = Admitted { work: w, needs: work.needs(), since: self.now };
        let queue = self.queues.entry(request.queue.clone()).or_default();
        if queue.admitted.contains_key(&work.arrived) {
            return true;
        }
        if runs || queue.quota().is_none() {
            queue.enter(work.arrived, one);
            if queue.is_over() {
                self.queue_look = Some(Time::ZERO);
            }
            return true;
        }
        queue.line.insert(work.arrived, one);
        self.queue_look = Some(Time::ZERO);
        false
    }

    /// A work leaves its queue; it lines up again when its pods are there.
    pub(super) fn dismiss(&mut self, work: &Work) {
        let Some(name) = work.request.as_ref().map(|r| &r.queue) else { return };
        let Some(queue) = self.queues.get_mut(name) else { return };
        queue.line.remove(&work.arrived);
        let left = queue.admitted.remove(&work.arrived);
        if let Some(left) = left {
            queue.taken -= left.needs;
            self.queue_look = Some(Time::ZERO);
        }
        if queue.is_idle() {
            self.queues.remove(name);
        }
        if left.is_some() {
            self.note_given_back(work);
        }
    }

    /// What a work had is free for others now, if they asked for it.
    pub(super) fn note_given_back(&mut self, work: &Work) {
        if work.reclaimed.is_some() {
            self.given_back.push((self.now, work.needs()));
        }
    }

    /// Admits the works of all queues that may go on, and has those given back that may not.
    pub(super) fn serve_queues(&mut self) {
        if self.queue_look.take_if(|at| *at <= self.now).is_none() {
            return;
        }
        self.queues.retain(|_, queue| !queue.is_idle());
        let now = self.now;
        self.given_back.retain(|(at, _)| now < *at + SETTLES);
        let names: Vec<String> = self.queues.keys().cloned().collect();
        for name in &names {
            self.admit_within(name);
        }
        let presses = |q: &Queue| !q.line.is_empty() || q.is_over();
        let pressed: Vec<&String> = names.iter().filter(|n| presses(&self.queues[*n])).collect();
        if pressed.is_empty() {
            return;
        }
        let waits = self.waits();
        for name in &pressed {
            let other = waits.iter().find(|wait| wait.queue != **name);
            if self.queues[*name].is_over() {
                self.give_back(name, &waits);
            }
            if self.queues[*name].borrows() && other.is_none() {
                self.borrow(name);
            }
            self.explain_line(name, other.map(|wait| wait.queue.as_str()));
        }
        self.queue_look.get_or_insert(self.now + LOOK_AGAIN);
    }

    /// Admits within the quota, in order.
    fn admit_within(&mut self, name: &str) {
        let Some(queue) = self.queues.get_mut(name) else { return };
        let small = |needs: u64| queue.quota().is_none_or(|quota| needs <= quota);
        let line: Vec<_> = queue.line.iter().filter(|(_, one)| small(one.needs)).collect();
        let line: Vec<_> = line.into_iter().map(|(arrived, one)| (*arrived, *one)).collect();
        for (arrived, one) in line {
            if !queue.fits(one.needs) {
                break;
            }
            queue.enter(arrived, Admitted { since: self.now, ..one });
            self.dirty.insert(one.work);
        }
    }

    /// Admits beyond the quota what fits on idle GPUs, in order.
    fn borrow(&mut self, name: &str) {
        let mut idle = self.idle();
        let Some(queue) = self.queues.get_mut(name) else { return };
        let line: Vec<_> = queue.line.iter().map(|(arrived, one)| (*arrived, *one)).collect();
        for (arrived, one) in line {
            if one.needs > idle {
                break;
            }
            idle -= one.needs;
            queue.enter(arrived, Admitted { since: self.now, ..one });
            self.dirty.insert(one.work);
        }
    }

    /// Has a queue that is over its quota give back: what waits if another queue waits too or it
    /// may not borrow, and what runs if the other one has waited for a while.
    fn give_back(&mut self, name: &str, waits: &[Wait]) {
        let queue = &self.queues[name];
        let (Some(quota), borrows) = (queue.quota(), queue.borrows()) else { return };
        let others = || waits.iter().filter(|wait| wait.queue != name);
        let owed: u64 = others().filter(|wait| wait.is_long).map(|wait| wait.needs).sum();
        let for_whom = others().find(|wait| wait.is_long).map(|wait| wait.queue.clone());
        let waiting_goes = !borrows || others().next().is_some();
        let (mut taken, mut returned) = (queue.taken, self.returning());
        let newest: Vec<Admitted> = queue.admitted.values().rev().copied().collect();
        for one in newest {
            if taken <= quota {
                break;
            }
            let held = self.is_placed(one.work);
            let Some(Some(work)) = self.works.get_mut(one.work as usize) else { continue };
            if work.reclaimed.is_some() {
                taken -= one.needs;
            } else if held && returned < owed {
                let other = for_whom.as_deref().unwrap_or_default();
                let why = format!("queue {name} borrowed its GPUs, and queue {other} needs them");
                work.reclaimed = Some(why);
                (taken, returned) = (taken - one.needs, returned + one.needs);
                self.dirty.insert(one.work);
            } else if !held && waiting_goes {
                work.reclaimed = Some(format!("queue {name} is over its quota"));
                taken -= one.needs;
                self.dirty.insert(one.work);
            }
        }
    }

    /// Tells the works in a line why they wait.
    fn explain_line(&mut self, name: &str, other: Option<&str>) {
        let queue = &self.queues[name];
        let Some(quota) = queue.quota() else { return };
        let (used, _) = self.placed(queue);
        let mut state = format!("queue {name} uses {} of its {} GPUs", gpus(used), gpus(quota));
        if queue.taken > used {
            let more = gpus(queue.taken - used);
            state = format!("{state}, and {more} more are promised to pods before this");
        }
        let beyond = match (queue.borrows(), other) {
            (false, _) => String::new(),
            (true, Some(other)) => {
                format!("; it may not borrow while queue {other} waits for GPUs")
            }
            (true, None) => "; it may borrow, but too few GPUs are idle".into(),
        };
        let line: Vec<Admitted> = queue.line.values().copied().collect();
        for one in line {
            let Some(mut work) = self.works.get_mut(one.work as usize).and_then(Option::take)
            else {
                continue;
            };
            let needs = gpus(one.needs);
            let why = if one.needs > quota {
                let s = if one.needs == 1000 { "" } else { "s" };
                format!("needs {needs} GPU{s}, more than the quota of its queue; {state}{beyond}")
            } else {
                format!("{state}; this needs {needs}{beyond}")
            };
            self.explain_later(one.work, &mut work, &why);
            self.works[one.work as usize] = Some(work);
        }
    }

    /// Queues within their quota that wait for GPUs.
    fn waits(&self) -> Vec<Wait> {
        let mut all = Vec::new();
        for (name, queue) in &self.queues {
            if queue.quota().is_none() || queue.is_over() {
                continue;
            }
            let waiting = || queue.admitted.values().filter(|one| self.waits_for_gpus(one.work));
            let is_long = |one: &&Admitted| self.now >= one.since + RECLAIM_AFTER;
            let long: u64 = waiting().filter(is_long).map(|one| one.needs).sum();
            if waiting().next().is_some() {
                let needs = long.max(1);
                all.push(Wait { queue: name.clone(), needs, is_long: long > 0 });
            }
        }
        all
    }

    /// Whether the engine could place a work and has not yet.
    fn waits_for_gpus(&self, w: u32) -> bool {
        let Some(Some(work)) = self.works.get(w as usize) else { return false };
        let Some((job, part)) = work.job.zip(self.part.as_ref()) else {
            return self.part.is_some();
        };
        let state = part.engine.state();
        let waits = matches!(state.job(job).phase, Phase::Pending | Phase::BackingOff);
        waits && state.usable_by(job) >= u32::from(state.spec(job).gpus)
    }

    /// Whether the work has GPUs. A new part does not know it at once, but its pods do.
    fn is_placed(&self, w: u32) -> bool {
        let placed = |p| matches!(p, Phase::Starting | Phase::Running | Phase::Stopping);
        let holds = |uid: &String| self.pods.get(uid).is_some_and(Known::holds);
        let work = self.works.get(w as usize).and_then(Option::as_ref);
        self.phase(w).is_some_and(placed) || work.is_some_and(|work| work.pods.iter().any(holds))
    }

    /// What the works of a queue hold, and how many of them hold something.
    fn placed(&self, queue: &Queue) -> (u64, u32) {
        let placed = queue.admitted.values().filter(|one| self.is_placed(one.work));
        placed.fold((0, 0), |(sum, n), one| (sum + one.needs, n + 1))
    }

    /// What is being given back to others, or was a moment ago.
    fn returning(&self) -> u64 {
        let all = self.queues.values().flat_map(|queue| queue.admitted.values());
        let leaves = |one: &&Admitted| {
            let work = self.works.get(one.work as usize).and_then(Option::as_ref);
            self.is_placed(one.work) && work.is_some_and(|work| work.reclaimed.is_some())
        };
        let settles: u64 = self.given_back.iter().map(|(_, needs)| needs).sum();
        settles + all.filter(leaves).map(|one| one.needs).sum::<u64>()
    }

    /// What is left of all GPUs once those that are admitted have theirs.
    fn idle(&self) -> u64 {
        let mut idle = 0;
        for (name, known) in self.nodes.iter().filter(|(_, known)| known.up) {
            let all = self.ledger.node(name);
            for gpu in known.shape.iter().flat_map(Shape::healthy) {
                let held = all.get(usize::from(gpu)).map(|held| (held.pods, held.share_permille));
                // Pods that are promised nothing may use all of their GPU.
                idle += match held {
                    None | Some((0, _)) => 1000,
                    Some((_, 0)) => 0,
                    Some((_, share)) => 1000 - u64::from(share.min(1000)),
                };
            }
        }
        let all = self.queues.values().flat_map(|queue| queue.admitted.values());
        let waiting = all.filter(|one| !self.is_placed(one.work));
        idle.saturating_sub(waiting.map(|one| one.needs).sum())
    }
}

impl Work {
    /// Thousandths of GPUs that it counts for.
    fn needs(&self) -> u64 {
        let Some(request) = &self.request else { return 0 };
        let pods = u64::from(self.size) * u64::from(request.gpus);
        pods * u64::from(request.knobs.sm_permille)
    }
}

/// A queue within its quota that waits for GPUs.
struct Wait {
    queue: String,
    /// What its works need that have waited for a while.
    needs: u64,
    /// Whether any has.
    is_long: bool,
}

/// Thousandths of GPUs as people write them.
pub(super) fn gpus(permille: u64) -> String {
    let (whole, rest) = (permille / 1000, permille % 1000);
    if rest == 0 {
        return whole.to_string();
    }
    format!("{whole}.{}", format!("{rest:03}").trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousandths_are_written_as_gpus() {
        for (permille, text) in [(0, "0"), (7500, "7.5"), (8000, "8"), (50, "0.05"), (333, "0.333")]
        {
            assert_eq!(gpus(permille), text);
        }
    }
}
