//! Migration: suspended jobs to idle GPUs, packed jobs out of their packs, spread gangs onto one
//! node, jobs off nodes that are nearly empty, and nodes from one class to another.

use super::time_sharing::{class_of, idle_gpus_on};
use super::{Gandiva, age_s, pays};
use crate::idx::{GpuSet, JobIdx, NodeIdx};
use crate::job::Phase;
use crate::plan::Plan;
use crate::time::Span;
use smallvec::SmallVec;
use std::cmp::Reverse;

impl Gandiva {
    fn may_migrate(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        let cool = Span::from_secs(self.params.cool_s);
        self.records[job].last_migration.is_none_or(|at| plan.now - at >= cool)
    }

    /// Moves a job that is not placed to these GPUs and to the queue of their node.
    fn migrate(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &GpuSet) -> bool {
        if !self.time_share.place(plan, job, gpus) {
            return false;
        }
        self.time_share.remove(plan, job);
        self.time_share.join_placed(plan, job);
        let record = &mut self.records[job];
        record.alone = None;
        record.last_migration = Some(plan.now);
        true
    }

    /// Migrates suspended jobs from the most oversubscribed nodes to idle GPUs, longest waiting
    /// first.
    pub(super) fn migrate_suspended(&mut self, plan: &mut Plan<'_>) {
        let mut oversubscribed: Vec<NodeIdx> = self.time_share.oversubscribed.iter().collect();
        oversubscribed.sort_by_key(|n| {
            let load = self.time_share.queue_of(*n).load;
            (Reverse(load.div_ceil(u32::from(plan.node(*n).size))), Reverse(load), *n)
        });
        for node in oversubscribed {
            let share = f64::from(plan.node(node).size)
                / f64::from(self.time_share.queue_of(node).load.max(1));
            let gain = (1.0 - share).max(0.0);
            let waiting = self.time_share.queue_of(node).units.iter();
            let waiting = waiting.filter(|u| u.jobs.len() == 1 && u.is_ready(plan));
            let waiting: SmallVec<[JobIdx; 16]> = waiting.map(|u| u.jobs[0]).collect();
            for job in waiting {
                if plan.idle_gpus() == 0 {
                    return;
                }
                let started = plan.job(job).starts > 0;
                let cost = if started { plan.move_cost(job) } else { Span::ZERO };
                if !self.may_migrate(plan, job) || !pays(plan, job, cost, gain) {
                    continue;
                }
                let target = self.unsliced_node(plan, job).filter(|n| *n != node);
                let gpus = target.and_then(|n| self.time_share.spare_gpus(plan, job, n));
                if gpus.is_some_and(|gpus| self.migrate(plan, job, &gpus)) {
                    self.time_share.fill(plan);
                }
            }
        }
    }

    /// Migrates the job that a pack slows down most to idle GPUs.
    pub(super) fn split_packs(&mut self, plan: &mut Plan<'_>) {
        for node in self.packed_without_trial() {
            let packs = self.time_share.queue_of(node).units.iter().filter(|u| u.jobs.len() > 1);
            let packs: Vec<SmallVec<[JobIdx; 2]>> = packs.map(|u| u.jobs.clone()).collect();
            for pack in packs {
                if pack.iter().all(|j| plan.job(*j).phase == Phase::Running) {
                    self.split_pack(plan, node, &pack);
                }
            }
        }
    }

    fn split_pack(&mut self, plan: &mut Plan<'_>, node: NodeIdx, pack: &[JobIdx]) {
        let speed = |j: JobIdx| self.gain(plan, [j].into_iter());
        let known = pack.iter().filter_map(|j| Some((speed(*j)?, *j)));
        let Some((speed, job)) = known.min_by(|a, b| a.0.total_cmp(&b.0)) else { return };
        if !self.may_migrate(plan, job) || !pays(plan, job, plan.move_cost(job), 1.0 - speed) {
            return;
        }
        let here = self.time_share.spare_gpus(plan, job, node);
        let elsewhere = || {
            let target = self.time_share.unsliced_node(plan, job).filter(|n| *n != node)?;
            self.time_share.spare_gpus(plan, job, target)
        };
        let Some(gpus) = here.or_else(elsewhere) else { return };
        let mark = plan.mark();
        plan.release(job);
        if self.migrate(plan, job, &gpus) {
            for mate in pack {
                self.time_share.restart_measurement(*mate, plan.now);
            }
            self.time_share.fill(plan);
        } else {
            plan.undo_to(mark);
        }
    }

    /// Migrates gangs that span nodes to one node, if they are faster there.
    pub(super) fn consolidate_gangs(&mut self, plan: &mut Plan<'_>) {
        for job in self.time_share.spanning().collect::<Vec<_>>() {
            if plan.job(job).phase != Phase::Running || !self.may_migrate(plan, job) {
                continue;
            }
            let was = plan.job(job).gpus.clone();
            let cost = plan.move_cost(job);
            let mark = plan.mark();
            plan.release(job);
            self.time_share.remove(plan, job);
            let target = self.time_share.unsliced_node(plan, job);
            let gpus = target.and_then(|n| self.time_share.spare_gpus(plan, job, n));
            let better = gpus.filter(|new| {
                let relative = plan.solo_speed(job, &was) / plan.solo_speed(job, new);
                let gain = 1.0 - relative;
                gain > self.params.migrate_gain && pays(plan, job, cost, gain)
            });
            if !better.is_some_and(|gpus| self.migrate(plan, job, &gpus)) {
                plan.undo_to(mark);
                self.time_share.join_placed(plan, job);
            }
        }
    }

    /// Empties nodes with few jobs onto fuller ones, so that wide jobs find room.
    pub(super) fn defragment(&mut self, plan: &mut Plan<'_>) {
        let mut skipped: SmallVec<[NodeIdx; 8]> = SmallVec::new();
        while let Some(source) = self.least_used_node(plan, &skipped) {
            let list = &self.time_share.queue_of(source).units;
            let mut jobs: SmallVec<[JobIdx; 8]> = list.iter().map(|u| u.jobs[0]).collect();
            jobs.sort_by_key(|j| (plan.spec(*j).gpus, *j));
            let moved = jobs.iter().filter(|j| self.defragment_one(plan, source, **j)).count();
            if moved == 0 {
                skipped.push(source);
            }
        }
    }

    /// The node with most idle GPUs among those with jobs, none of them packed, suspended or
    /// spanning.
    fn least_used_node(&self, plan: &Plan<'_>, skipped: &[NodeIdx]) -> Option<NodeIdx> {
        let is_candidate = |n: &NodeIdx| {
            let (queue, node) = (self.time_share.queue_of(*n), plan.node(*n));
            let idle = f64::from(node.idle) / f64::from(node.size);
            !queue.units.is_empty()
                && queue.spanned == 0
                && idle >= self.params.defrag_stop
                && !self.time_share.oversubscribed.contains(*n)
                && !self.time_share.packed.contains(*n)
                && !self.trials.contains_key(n)
                && !skipped.contains(n)
        };
        let largest = (0..plan.gpu_models.len() as u8).map(|k| plan.idle.largest(k)).max()?;
        (1..=largest).rev().find_map(|idle| {
            let gpu_models =
                (0..plan.gpu_models.len() as u8).filter(|k| idle <= plan.idle.largest(*k));
            gpu_models.flat_map(|k| plan.idle.nodes(k, idle).iter()).filter(is_candidate).max()
        })
    }

    fn defragment_one(&mut self, plan: &mut Plan<'_>, source: NodeIdx, job: JobIdx) -> bool {
        if plan.job(job).phase != Phase::Running || !self.may_migrate(plan, job) {
            return false;
        }
        let was = plan.job(job).gpus.clone();
        let cost = plan.move_cost(job);
        let mark = plan.mark();
        let idle = plan.node(source).idle;
        let last = self.time_share.queue_of(source).units.len() == 1;
        let Some(gpus) = self.time_share.best_fit(plan, source, job, idle, last) else {
            return false;
        };
        let slower = 1.0 - plan.solo_speed(job, &gpus) / plan.solo_speed(job, &was);
        let loss_s = cost.secs() + slower.max(0.0) * age_s(plan, job);
        if loss_s > self.params.migrate_gain * age_s(plan, job) {
            return false;
        }
        plan.release(job);
        if !self.migrate(plan, job, &gpus) {
            plan.undo_to(mark);
            return false;
        }
        self.time_share.fill(plan);
        true
    }

    /// Reassigns a node from a class with more GPUs than its share of the demand to one with fewer.
    pub(super) fn balance_classes(&mut self, plan: &mut Plan<'_>) {
        let Some(every) = self.params.balance_s.map(Span::from_secs) else { return };
        let balance = plan.now.0 / every.0;
        if balance <= self.last_balance || self.time_share.oversubscribed.is_empty() {
            return;
        }
        self.last_balance = balance;
        let may_go = |n: NodeIdx| !self.trials.contains_key(&n);
        if let Some((source, target_class)) = self.time_share.imbalance(plan, &may_go) {
            for job in self.time_share.vacate(plan, source) {
                self.records[job].alone = None;
            }
            if self.time_share.queue_of(source).units.is_empty() {
                self.fill_with_class(plan, source, target_class);
            }
            self.time_share.fill(plan);
        }
    }

    /// Migrates suspended jobs of a class from the most loaded nodes to an empty node.
    fn fill_with_class(&mut self, plan: &mut Plan<'_>, node: NodeIdx, class: u16) {
        let mut oversubscribed: Vec<NodeIdx> =
            self.time_share.oversubscribed.iter().filter(|n| *n != node).collect();
        oversubscribed.sort_by_key(|n| (Reverse(self.time_share.queue_of(*n).load), *n));
        let waiting = oversubscribed.iter().flat_map(|n| &self.time_share.queue_of(*n).units);
        let wanted = |j: &JobIdx| class_of(plan.spec(*j).gpus) == class;
        let waiting = waiting.filter(|u| u.jobs.len() == 1 && u.is_ready(plan));
        let waiting: Vec<JobIdx> = waiting.map(|u| u.jobs[0]).filter(wanted).collect();
        for job in waiting {
            if let Some(gpus) = idle_gpus_on(plan, job, node) {
                self.migrate(plan, job, &gpus);
            }
        }
    }
}
