//! How tenants run beside each other: knobs, users, roommates and guards together give one [`Tune`]
//! for each tenant, which is sent to tenants with the SDK and enforced by signals on others.

use crate::device::Allowed;
use crate::machine::tenant::{Goal, JobRuntime, Tenant};
use crate::machine::{Machine, sm_partition};
use crate::process::duty_cycle::DutyCycle;
use crate::protocol::{SmRange, ToTenant, Tune};
use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::knobs::Knobs;
use std::time::Duration;

/// How long a tenant may take to leave its SM range; after that other tenants do not wait for it.
const MOVES_WITHIN: Duration = Duration::from_secs(2);

impl Machine {
    /// Applies to a job what its knobs, its user and its roommates require.
    pub(super) fn tell(&mut self, job: JobIdx) {
        let Some(orders) = self.wanted(job, &self.interleaved_gpus()) else { return };
        let now = self.now();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let Some(t) = &mut known.tenant else { return };
        let was = std::mem::replace(&mut t.orders, orders);
        t.ordered_at = now;
        if (was.seat != orders.seat || was.batch != orders.batch)
            && let Some(guard) = self.guards.get_mut(&job)
        {
            guard.begin_again(orders.batch, now);
        }
        let pace_permille = t.knobs.pace_permille.min(orders.pace_permille);
        let knobs = Knobs { pace_permille, ..t.knobs };
        let (group, devices, connected) = (t.attempt.group(), t.gpus.len(), t.peer.is_some());
        if let Some(peer) = &t.peer {
            peer.send(&ToTenant::Tune(orders));
        }
        let _ = self.device.confine(&group, devices, known.allowed(knobs), connected);
        if !connected {
            self.drive(job);
        }
    }

    /// Lets a tenant without a connection run, pauses it, or starts its duty cycle.
    pub(super) fn drive(&mut self, job: JobIdx) {
        let now = self.now();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let held = known.user.held;
        let Some(t) = &mut known.tenant else { return };
        let pace = t.orders.pace_permille.min(t.knobs.pace_permille);
        // A job that has not connected yet learns from the answer to its hello that its user holds
        // it.
        if (held && t.hello_due.is_none()) || pace == 0 {
            t.duty_cycle = None;
            self.control.freeze(t);
            return;
        }
        match self.device.sliced(pace) {
            Some(part) if t.duty_cycle.as_ref().is_some_and(|s| s.share() == part) => {}
            Some(part) => {
                self.control.thaw(t);
                t.duty_cycle = Some(DutyCycle::new(part, now));
            }
            None => {
                t.duty_cycle = None;
                self.control.thaw(t);
            }
        }
    }

    /// Stops and continues tenants with a duty cycle.
    pub(super) fn turn_duty_cycles(&mut self) {
        let now = self.now();
        let tenants = self.jobs.values_mut().filter_map(|j| j.tenant.as_mut());
        for t in tenants.filter(|t| t.goal == Goal::Run) {
            match t.duty_cycle.as_mut().and_then(|s| s.turn(now)) {
                Some(true) => self.control.thaw(t),
                Some(false) => self.control.freeze(t),
                None => {}
            }
        }
    }

    /// The pace that the job has to keep because of its share, without guards.
    pub(crate) fn own_pace_permille(&self, job: JobIdx) -> Option<u16> {
        let known = self.jobs.get(&job)?;
        let t = known.tenant.as_ref()?;
        Some(self.device.own_pace_permille(known.allowed(t.knobs), t.is_mps_client()))
    }

    /// How the job has to run, given its knobs, its user and its roommates; on these GPUs tenants
    /// take turns in the stages of their steps.
    pub(super) fn wanted(&self, job: JobIdx, interleaved: &[GpuIdx]) -> Option<Tune> {
        let known = self.jobs.get(&job)?;
        let t = known.tenant.as_ref()?;
        let own = self.device.own_pace_permille(known.allowed(t.knobs), t.is_mps_client());
        let beside =
            |other: JobIdx| self.tenant(other).is_some_and(|o| t.gpus.iter().any(|g| o.uses(*g)));
        let guards = self.guards.iter().filter(|(other, _)| **other != job && beside(**other));
        let allowed = match t.knobs.floor_permille {
            0 => guards.map(|(_, g)| g.pace_permille(self.now())).min().unwrap_or(Knobs::PACE_FULL),
            _ => Knobs::PACE_FULL,
        };
        let for_service = self.held_back_for(job, t).map_or(Knobs::PACE_FULL, |(_, pace)| pace);
        // A tenant that can be confined is held back by fewer SMs as far as that goes: at the same
        // speed it disturbs less than one that runs on all SMs for a part of the time.
        let seat = self.sm_range(job);
        let limit = if seat.is_none() { self.limited(t, known, allowed) } else { None };
        let allowed = limit.map_or(allowed, |(_, pace)| pace);
        let (user, asked, mem_mib) = (known.user, known.program.mem_mib, t.knobs.mem_mib);
        let batch = if user.batch > 0 { user.batch } else { t.knobs.batch };
        let for_look = if self.stands_still(job) { 0 } else { Knobs::PACE_FULL };
        Some(Tune {
            pace_permille: own.min(allowed).min(for_service).min(for_look),
            interleaved: t.gpus.iter().any(|g| interleaved.binary_search(g).is_ok()),
            seat: seat.or(limit.map(|(range, _)| range)),
            gpu_mib: if mem_mib < asked { mem_mib } else { 0 },
            shared: known.program.service.is_some() && self.has_training_roommates(job),
            ..Tune::of(&Knobs { batch, ..t.knobs })
        })
    }

    /// The SM range and the pace in it of a tenant that may run at this part of its speed; `None` =
    /// it cannot be confined, or need not be.
    fn limited(&self, t: &Tenant, known: &JobRuntime, permille: u16) -> Option<(SmRange, u16)> {
        let ([gpu], true) = (&t.gpus[..], t.is_mps_client() && known.uses_sdk()) else {
            return None;
        };
        sm_partition::limited(self.device.sm_groups(*gpu), permille)
    }

    /// Tenants that use this GPU.
    pub(super) fn tenants_of(&self, gpu: GpuIdx) -> impl Iterator<Item = (JobIdx, &Tenant)> {
        let tenants = self.jobs.iter().filter_map(|(job, j)| Some((*job, j.tenant.as_ref()?)));
        tenants.filter(move |(_, t)| t.uses(gpu))
    }

    /// GPUs with several tenants that take turns in the stages of their steps, in order.
    pub(super) fn interleaved_gpus(&self) -> Vec<GpuIdx> {
        let tenants = || self.jobs.values().filter_map(|j| j.tenant.as_ref());
        let staged = tenants().filter(|t| t.knobs.stage > 0).flat_map(|t| &t.gpus);
        let mut gpus: Vec<GpuIdx> = staged.copied().collect();
        // Usually there are none, and this is called for every message.
        if gpus.is_empty() {
            return gpus;
        }
        gpus.sort_unstable();
        gpus.dedup();
        let mut used: Vec<GpuIdx> = tenants().flat_map(|t| &t.gpus).copied().collect();
        used.sort_unstable();
        let count =
            |g: GpuIdx| used.partition_point(|u| *u <= g) - used.partition_point(|u| *u < g);
        gpus.retain(|g| count(*g) > 1);
        gpus
    }

    /// The SM range of a job now: the one that it is to get or, while another tenant is still
    /// leaving that one, the range that it has.
    fn sm_range(&self, job: JobIdx) -> Option<SmRange> {
        let t = self.tenant(job)?;
        let [gpu] = t.gpus[..] else { return None };
        let ranges = self.sm_ranges(gpu);
        let wanted = ranges.iter().find(|(other, _)| *other == job).and_then(|r| r.1)?;
        let now = self.now();
        let in_the_way = ranges.iter().filter(|(other, _)| *other != job).any(|(other, its)| {
            let Some(o) = self.tenant(*other) else { return false };
            let moves = o.range != *its && now.duration_since(o.ordered_at) < MOVES_WITHIN;
            let has = o.range.is_some_and(|s| sm_partition::overlap(s, wanted));
            let keeps = its.is_some_and(|s| sm_partition::overlap(s, wanted));
            o.peer.is_some() && moves && has && !keeps
        });
        if in_the_way { t.range } else { Some(wanted) }
    }

    /// The SM ranges that the tenants of a GPU are to get, by job.
    fn sm_ranges(&self, gpu: GpuIdx) -> Vec<(JobIdx, Option<SmRange>)> {
        let groups = self.device.sm_groups(gpu);
        if groups.groups == 0 {
            return Vec::new();
        }
        let divides = |t: &Tenant| t.goal == Goal::Run && t.is_mps_client() && t.gpus[..] == [gpu];
        let here = self.jobs.iter().filter_map(|(job, known)| {
            let t = known.tenant.as_ref().filter(|t| divides(t))?;
            let Allowed { share, promised, .. } = known.allowed(t.knobs);
            Some((*job, sm_partition::Claim { share, promised }))
        });
        let (jobs, claims): (Vec<JobIdx>, Vec<sm_partition::Claim>) = here.unzip();
        jobs.into_iter().zip(sm_partition::ranges(groups, &claims)).collect()
    }

    /// Whether another tenant uses one of the job's GPUs.
    pub(super) fn has_roommates(&self, job: JobIdx) -> bool {
        let shares = |gpu: &GpuIdx| self.tenants_of(*gpu).any(|(other, _)| other != job);
        self.tenant(job).is_some_and(|t| t.gpus.iter().any(shares))
    }

    /// Whether a tenant that is no service uses one of the job's GPUs.
    fn has_training_roommates(&self, job: JobIdx) -> bool {
        let trains = |other: JobIdx| {
            other != job && self.jobs.get(&other).is_some_and(|j| j.program.service.is_none())
        };
        let shares = |gpu: &GpuIdx| self.tenants_of(*gpu).any(|(other, _)| trains(other));
        self.tenant(job).is_some_and(|t| t.gpus.iter().any(shares))
    }

    /// Has the guards account for the time that passed. A job that is away for a moment keeps its
    /// guard, and so the credit that it has used up.
    fn watch_guards(&mut self) {
        let now = self.now();
        let mut guards = std::mem::take(&mut self.guards);
        guards.retain(|job, guard| {
            let guarded = self.tenant(*job).filter(|t| t.knobs.floor_permille > 0);
            if let Some(t) = guarded {
                let present = t.goal == Goal::Run && t.peer.is_some();
                guard.watch(present, self.has_roommates(*job), now);
            }
            guarded.is_some()
        });
        self.guards = guards;
    }

    /// Sends new orders to tenants whose roommates or guards changed.
    pub(super) fn settle(&mut self) {
        self.watch_guards();
        self.watch_services();
        self.note_held_back();
        let interleaved = self.interleaved_gpus();
        let runs = |t: &Tenant| t.goal == Goal::Run;
        let running = self.jobs.iter().filter(|(_, j)| j.tenant.as_ref().is_some_and(runs));
        for job in running.map(|(job, _)| *job).collect::<Vec<_>>() {
            let orders = self.tenant(job).map(|t| t.orders);
            if orders.is_some() && orders != self.wanted(job, &interleaved) {
                self.tell(job);
            }
        }
    }
}
