//! Messages of tenants become reports: tenants report steps, confirm orders, and take turns at
//! stages.

use crate::machine::connection::Peer;
use crate::machine::sm_partition::{self, LEAST_SMS};
use crate::machine::speed_guard::{Guard, StepReport};
use crate::machine::tenant::{Goal, JobRuntime, Tenant};
use crate::machine::{Machine, Report};
use crate::os::Os;
use crate::protocol::{self, FromTenant, Hello, Nothing, Stage, Stepped, ToTenant, Tuned, Welcome};
use roommate_core::event::Sample;
use roommate_core::idx::JobIdx;
use roommate_core::number::{Number, Number32, Positive};
use std::time::{Duration, Instant};

/// A sample is reported when the step time changed by this part, or after [`SAMPLE_EVERY`].
const SAMPLE_CHANGE: f64 = 0.1;
const SAMPLE_EVERY: Duration = Duration::from_secs(10);
/// The same for a job whose batch size may be tuned, because the search waits for its samples.
const SAMPLE_TUNED_EVERY: Duration = Duration::from_secs(1);
/// No sample is reported sooner than this after the last one: each is a line in the journal.
const SAMPLE_LEAST: Duration = Duration::from_millis(200);

const NO_SUCH_TOKEN: &str = "the token is not that of a job on this machine";

/// The last sample that was reported of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampled {
    at: Instant,
    step_s: f64,
    batch: u32,
}

impl Sampled {
    /// After it the next steps are reported, whatever they take.
    pub(super) fn outdated(self) -> Self {
        Self { step_s: 0.0, ..self }
    }
}

/// Steps since the last sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    steps: u64,
    busy_s: f64,
    since: Instant,
    /// CPU time of the process at that moment.
    cpu_s: f64,
}

impl Machine {
    /// Handles a message.
    pub(super) fn on_message(&mut self, peer: &Peer, message: FromTenant) {
        if let FromTenant::Hello(hello) = message {
            return self.on_hello(peer, &hello);
        }
        let sent = |t: &Tenant| t.peer.as_ref().is_some_and(|p| p.id == peer.id);
        let sender = self.jobs.iter().find(|(_, j)| j.tenant.as_ref().is_some_and(sent));
        let Some(job) = sender.map(|(job, _)| *job) else { return };
        match message {
            FromTenant::Hello(_) => {}
            FromTenant::Stepped(stepped) => self.on_steps(job, stepped),
            FromTenant::Tuned(tuned) => self.on_tuned(job, &tuned),
            FromTenant::Suspended(done) => self.on_suspended(job, done.done),
            FromTenant::Resumed(_) => {
                if let Some(known) = self.jobs.get_mut(&job) {
                    known.tally = None;
                    known.sampled = known.sampled.map(Sampled::outdated);
                }
            }
            FromTenant::Checkpointed(done) => {
                if let Some(known) = self.jobs.get_mut(&job) {
                    known.checkpoint = done.done;
                }
                self.report(Report::Checkpointed { job, done: done.done });
            }
            FromTenant::Served(served) => self.on_served(job, served),
            FromTenant::Enter(Stage { stage }) => self.on_enter(job, &stage),
            FromTenant::Leave(Stage { stage }) => {
                if let Some(stage) = protocol::stage_index(&stage) {
                    let admitted = self.stages.leave(job, stage, self.control.os.now());
                    self.admit_to_stages(&admitted);
                }
            }
        }
    }

    fn on_tuned(&mut self, job: JobIdx, tuned: &Tuned) {
        let Some(t) = self.tenant_mut(job) else { return };
        t.range = tuned.seat;
        let orders = t.orders;
        let follows = tuned.seat == orders.seat;
        let follows = follows && (orders.batch == 0 || tuned.batch == orders.batch);
        let due = std::mem::take(&mut t.tune_due);
        if let Some(guard) = self.guards.get_mut(&job).filter(|_| follows) {
            guard.changed();
        }
        if due {
            self.report(Report::Tuned(job));
        }
    }

    fn on_suspended(&mut self, job: JobIdx, done: f64) {
        let Some(t) = self.tenant_mut(job) else { return };
        if t.goal == (Goal::Suspend { still: false }) {
            (t.goal, t.deadline) = (Goal::Suspend { still: true }, None);
            self.report(Report::Stopped { job, done: Some(done) });
        }
    }

    fn on_enter(&mut self, job: JobIdx, stage: &str) {
        let gpus = self.tenant(job).map(|t| t.gpus.clone());
        if let Some((stage, gpus)) = protocol::stage_index(stage).zip(gpus) {
            let admitted = self.stages.enter(job, stage, &gpus, self.control.os.now());
            self.admit_to_stages(&admitted);
        }
    }

    fn on_hello(&mut self, peer: &Peer, hello: &Hello) {
        let Some(version) = peer.agree_on_version(hello) else { return };
        let is_its = |j: &JobRuntime| j.tenant.as_ref().is_some_and(|t| t.token == hello.token);
        let Some(job) = self.jobs.iter().find(|(_, j)| is_its(j)).map(|(job, _)| *job) else {
            if self.is_expected(&hello.token) {
                peer.put_off("its container is being prepared");
            } else {
                peer.refuse(NO_SUCH_TOKEN);
            }
            return;
        };
        // Whoever learned the token of another user's job does not speak for it.
        let owner = self.jobs[&job].program.user.as_ref().map(|u| u.uid);
        let is_its = owner.is_none_or(|uid| peer.is_of(uid));
        if !is_its || !self.is_from_its_container(job, peer) {
            peer.refuse(NO_SUCH_TOKEN);
            return;
        }
        if !peer.admit() {
            return;
        }
        let Some(orders) = self.wanted(job, &self.interleaved_gpus()) else { return };
        let plan_sms = self.least_sms(job);
        let now = self.now();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        known.spoke = true;
        let held = known.user.held;
        let Some(t) = &mut known.tenant else { return };
        let group = t.attempt.group();
        (t.orders, t.ordered_at, t.range) = (orders, now, orders.seat);
        t.batches = hello.batch.or(t.batches);
        peer.send(&ToTenant::Welcome(Welcome {
            version,
            job: known.program.name.clone(),
            done: known.checkpoint,
            tune: orders,
            suspended: held || matches!(t.goal, Goal::Suspend { .. }),
            plan_sms,
        }));
        if matches!(t.goal, Goal::Leave { .. }) {
            peer.send(&ToTenant::Stop(Nothing {}));
        }
        // From now on the SDK enforces the pace, so the duty cycle ends.
        // In a container, pids are other ones.
        t.pid = if t.is_guest { peer.pid().unwrap_or(0) } else { hello.pid };
        // It may also have been stopped between its hello and now, and would never hear of it.
        t.duty_cycle = None;
        if t.goal == Goal::Run {
            self.control.thaw(t);
        }
        known.tally = Some(Tally::new(t, &self.control.os));
        if let Some(old) = t.peer.replace(peer.clone()).filter(|old| old.id != peer.id) {
            old.hang_up();
        }
        // A service is waited for until it is ready.
        let awaited = known.program.service.is_none();
        let begun = if awaited { t.hello_due.take() } else { None };
        let (knobs, devices) = (t.knobs, t.gpus.len());
        if begun.is_some() && t.goal == Goal::Run {
            t.deadline = None;
        }
        let _ = self.device.confine(&group, devices, known.allowed(knobs), true);
        if let Some(begun) = begun {
            self.report(Report::Started { job, done: begun.done });
            if held {
                self.report(Report::Speed { job, part: 0.0 });
            }
        }
    }

    /// SMs of the smallest range that the job may be confined to; 0 = it is never confined.
    fn least_sms(&self, job: JobIdx) -> u32 {
        let divided = self
            .tenant(job)
            .is_some_and(|t| t.is_mps_client() && self.device.sm_groups(t.gpus[0]).groups > 0);
        if divided { LEAST_SMS.into() } else { 0 }
    }

    fn on_steps(&mut self, job: JobIdx, stepped: Stepped) {
        self.guard(job, &stepped);
        if self.looks_at(job, &stepped) {
            if let Some(known) = self.jobs.get_mut(&job) {
                known.seen = Some(stepped);
            }
            return;
        }
        let Some(t) = self.tenant(job) else { return };
        let reading = t.gpus.first().and_then(|g| self.device.reading(*g));
        let on_gpu = reading.is_some();
        let alone = t.gpus.iter().all(|g| self.tenants_of(*g).nth(1).is_none());
        let os = &self.control.os;
        let now = os.now();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let Some(t) = &known.tenant else { return };
        let pace = f64::from(t.orders.pace_permille.max(1)) / 1000.0;
        let step_s = stepped.step_s / pace;
        let every = if known.program.tunable { SAMPLE_TUNED_EVERY } else { SAMPLE_EVERY };
        let tally = known.tally.get_or_insert_with(|| Tally::new(t, os));
        let changed = known.sampled.is_none_or(|was| {
            was.batch != stepped.batch || (step_s - was.step_s).abs() > SAMPLE_CHANGE * was.step_s
        });
        if changed {
            // Steps from before the change would dilute it.
            (tally.steps, tally.busy_s) = (0, 0.0);
        }
        tally.steps = tally.steps.saturating_add(stepped.steps);
        tally.busy_s += step_s * stepped.steps as f64;
        let since = known.sampled.map(|was| now.duration_since(was.at));
        let late = since.is_some_and(|since| since >= every);
        let early = since.is_some_and(|since| since < SAMPLE_LEAST);
        // Steps of no length were not measured.
        let mean_s = Number::of(tally.busy_s / tally.steps as f64);
        if (changed || late) && !early && mean_s >= Positive::LEAST {
            let (busy, dram) = match reading {
                // The counters of a GPU can be attributed to a tenant only if it is the only one.
                Some(_) if !alone => (0.0, 0.0),
                Some(r) => r.counters.map_or((0.0, 0.0), |c| (c.sm_util.into(), c.dram.into())),
                None => (tally.busy(t, os), 0.0),
            };
            let sample = Sample {
                step_s: mean_s,
                done: Some(Number::of(stepped.done)),
                sm_util: Number32::of((busy / pace).min(1.0) as f32),
                dram_util: Number32::of(dram as f32),
                mem_mib: stepped.gpu_mib.unwrap_or(0),
                noise_scale: Number32::of(stepped.noise_scale.unwrap_or(0.0) as f32),
                batch: stepped.batch,
                ..Sample::default()
            };
            let step_s = mean_s.get();
            known.sampled = Some(Sampled { at: now, step_s, batch: stepped.batch });
            known.tally = Some(Tally::new(t, os));
            self.reports.push(Report::Sampled { job, sample });
        }
        // On cores the SDK reports host memory, which nobody runs out of here.
        if let Some(gpu_mib) = stepped.gpu_mib.filter(|_| on_gpu) {
            known.held_mib = known.held_mib.max(gpu_mib);
        }
        known.seen = Some(stepped);
    }

    /// Passes the report of a job with a floor to its guard.
    fn guard(&mut self, job: JobIdx, stepped: &Stepped) {
        let Some(t) = self.tenant(job) else { return };
        let floor_permille = t.knobs.floor_permille;
        if floor_permille == 0 || t.goal != Goal::Run {
            return;
        }
        let active = |other: JobIdx| {
            let known = &self.jobs[&other];
            let runs = |t: &Tenant| t.goal == Goal::Run && t.orders.pace_permille > 0;
            known.tenant.as_ref().is_some_and(runs) && !known.user.held
        };
        let roommates =
            || t.gpus.iter().flat_map(|g| self.tenants_of(*g)).filter(|(other, _)| *other != job);
        let alone = !roommates().any(|(other, _)| active(other));
        let is_apart = |other: &Tenant| {
            let ranges = t.orders.seat.zip(other.orders.seat);
            ranges.is_some_and(|(own, theirs)| !sm_partition::overlap(own, theirs))
        };
        let apart = roommates().next().is_some() && roommates().all(|(_, o)| is_apart(o));
        let now = self.now();
        let guard = self.guards.entry(job).or_insert_with(|| Guard::new(floor_permille, now));
        let Stepped { steps, step_s, load_s, batch, .. } = *stepped;
        let load_s = load_s.unwrap_or(0.0).min(step_s);
        guard.hear(StepReport { steps, step_s, load_s, batch }, alone, apart, now);
    }

    /// The connection of a tenant was closed.
    pub(super) fn on_gone(&mut self, id: u64) {
        let of_peer = |t: &Tenant| t.peer.as_ref().is_some_and(|p| p.id == id);
        let lost = self.jobs.iter_mut().find(|(_, j)| j.tenant.as_ref().is_some_and(of_peer));
        let Some((job, known)) = lost else { return };
        let job = *job;
        let Some(t) = &mut known.tenant else { return };
        let group = t.attempt.group();
        t.peer = None;
        // It may connect again; until then it is confined like a job without the SDK.
        let (knobs, devices) = (t.knobs, t.gpus.len());
        let _ = self.device.confine(&group, devices, known.allowed(knobs), false);
        let now = self.now();
        let admitted = self.stages.forget(job, now);
        self.admit_to_stages(&admitted);
    }

    /// Tells jobs that they may enter a stage.
    pub(super) fn admit_to_stages(&mut self, admitted: &[(JobIdx, u8)]) {
        for (job, stage) in admitted {
            let stage = protocol::STAGE_NAMES[usize::from(*stage)].to_string();
            if let Some(peer) = self.tenant(*job).and_then(|t| t.peer.as_ref()) {
                peer.send(&ToTenant::Go(Stage { stage }));
            }
        }
    }
}

impl Tally {
    /// Begins to count with the next report.
    fn new(tenant: &Tenant, os: &Os) -> Self {
        Self { steps: 0, busy_s: 0.0, since: os.now(), cpu_s: tenant.cpu_s(os) }
    }

    /// The part of its devices that the process has kept busy.
    fn busy(&self, tenant: &Tenant, os: &Os) -> f64 {
        let passed_s = os.now().duration_since(self.since).as_secs_f64();
        let whole_s = passed_s * tenant.gpus.len().max(1) as f64;
        ((tenant.cpu_s(os) - self.cpu_s) / whole_s.max(1e-3)).clamp(0.0, 1.0)
    }
}
