//! What tenants say becomes facts: they report steps, confirm what they were asked for, and take turns at stages.

use crate::AgentError;
use crate::daemon::World;
use crate::device::Allowed;
use crate::machine::connection::Peer;
use crate::machine::sm_partition::{self, LEAST_SMS};
use crate::machine::speed_guard::{Guard, Report};
use crate::machine::{Aim, Live, Tenant};
use crate::protocol::{self, FromTenant, Hello, Nothing, Stage, Stepped, ToTenant, Welcome};
use roommate_core::event::{Event, Sample};
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::job::Phase;
use std::time::{Duration, Instant};

/// A step's length is reported again when it changed by this share, or after [`SAMPLE_EVERY`].
const SAMPLE_CHANGE: f64 = 0.1;
const SAMPLE_EVERY: Duration = Duration::from_secs(10);
/// The same for a job whose batch size may be tuned: a search waits for what it measures.
const SAMPLE_TUNED_EVERY: Duration = Duration::from_secs(1);

/// What the engine was last told of a job's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampled {
    at: Instant,
    step_s: f64,
    batch: u32,
}

/// Reports that the engine has not been told of yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    steps: u64,
    busy_s: f64,
    since: Instant,
    /// CPU time of the process by then.
    cpu_s: f64,
}

impl World {
    /// Takes in a message.
    pub(crate) fn said(&mut self, peer: &Peer, message: FromTenant) -> Result<(), AgentError> {
        if let FromTenant::Hello(hello) = message {
            self.greet(peer, &hello);
            return Ok(());
        }
        let of_peer = |l: &Live| {
            l.tenant.as_ref().and_then(|t| t.peer.as_ref()).is_some_and(|p| p.id == peer.id)
        };
        let Some(idx) = self.live.iter().position(of_peer) else { return Ok(()) };
        let job = JobIdx::from_usize(idx);
        match message {
            FromTenant::Hello(_) => {}
            FromTenant::Stepped(stepped) => self.stepped(job, stepped),
            FromTenant::Tuned(tuned) => {
                let Some(t) = &mut self.live[idx].tenant else { return Ok(()) };
                t.seat = tuned.seat;
                let there =
                    tuned.seat == t.told.seat && (t.batch_told == 0 || tuned.batch == t.batch_told);
                if let Some(guard) = self.guards.get_mut(&job).filter(|_| there) {
                    guard.changed();
                }
                if std::mem::take(&mut t.tune_due) {
                    self.facts.push(Event::Tuned(job));
                }
            }
            FromTenant::Suspended(done) => {
                let Some(t) = &mut self.live[idx].tenant else { return Ok(()) };
                if t.aim == (Aim::Suspend { still: false }) {
                    t.aim = Aim::Suspend { still: true };
                    t.deadline = None;
                    self.facts.push(Event::Stopped { job, done: done.done });
                }
            }
            FromTenant::Resumed(_) => {
                (self.live[idx].sampled, self.live[idx].tally) = (None, None);
            }
            FromTenant::Checkpointed(done) => {
                self.live[idx].checkpoint = done.done;
                self.store.set_checkpoint(self.live[idx].id, done.done)?;
                self.store.commit()?;
            }
            FromTenant::Enter(Stage { stage }) => {
                let gpus = self.engine.state().job(job).gpus.clone();
                if let Some(stage) = protocol::stage_index(&stage) {
                    let admitted = self.stages.enter(job, stage, &gpus);
                    self.admit(&admitted);
                }
            }
            FromTenant::Leave(Stage { stage }) => {
                if let Some(stage) = protocol::stage_index(&stage) {
                    let admitted = self.stages.leave(job, stage);
                    self.admit(&admitted);
                }
            }
        }
        Ok(())
    }

    fn greet(&mut self, peer: &Peer, hello: &Hello) {
        if hello.version != protocol::VERSION {
            let (theirs, ours) = (hello.version, protocol::VERSION);
            peer.refuse(format!("it speaks version {theirs}, this machine speaks version {ours}"));
            return;
        }
        let is_its = |l: &Live| l.tenant.as_ref().is_some_and(|t| t.token == hello.token);
        let Some(idx) = self.live.iter().position(is_its) else {
            peer.refuse("its token is not that of a job on this machine");
            return;
        };
        let job = JobIdx::from_usize(idx);
        let told = self.wanted(job);
        let group = self.group(job);
        let confined = self.live[idx].tenant.as_ref().is_some_and(|t| {
            !t.apart && t.gpus.len() == 1 && self.device.seats(t.gpus[0]).groups > 0
        });
        let live = &mut self.live[idx];
        let Some(t) = &mut live.tenant else { return };
        (t.told, t.told_at, t.seat) = (told, Instant::now(), told.seat);
        t.batch_told = if live.batch > 0 { live.batch } else { t.knobs.batch };
        live.spoke = true;
        t.batches = hello.batch.or(t.batches);
        peer.say(&ToTenant::Welcome(Welcome {
            version: protocol::VERSION,
            job: live.name.clone(),
            done: live.checkpoint,
            batch: t.batch_told,
            pace_permille: told.pace_permille,
            suspended: live.held || matches!(t.aim, Aim::Suspend { .. }),
            interleaved: told.interleaved,
            seat: told.seat,
            gpu_mib: told.gpu_mib,
            plan_sms: if confined { LEAST_SMS.into() } else { 0 },
        }));
        if matches!(t.aim, Aim::Leave { .. }) {
            peer.say(&ToTenant::Stop(Nothing {}));
        }
        let allowed = Allowed::new(t.knobs, live.share);
        self.device.confine(&group, t.gpus.len(), allowed, true);
        // From now on it holds itself back.
        t.pid = hello.pid;
        if t.slicer.take().is_some() {
            t.thaw();
        }
        live.tally = Some(Tally::new(t));
        if let Some(old) = t.peer.replace(peer.clone()).filter(|old| old.id != peer.id) {
            old.hang_up();
        }
    }

    fn stepped(&mut self, job: JobIdx, stepped: Stepped) {
        self.watch_over(job, &stepped);
        let tunable = self.engine.state().profile(job).training.is_some();
        let gpus = &self.engine.state().job(job).gpus;
        let reading = gpus.first().and_then(|g| self.device.reading(*g));
        let alone = gpus.iter().all(|g| self.engine.state().gpu(*g).tenants.len() == 1);
        let live = &mut self.live[job.usize()];
        let Some(t) = &live.tenant else { return };
        let pace = f64::from(t.told.pace_permille.max(1)) / 1000.0;
        let step_s = stepped.step_s / pace;
        let every = if tunable { SAMPLE_TUNED_EVERY } else { SAMPLE_EVERY };
        let tally = live.tally.get_or_insert_with(|| Tally::new(t));
        let changed = live.sampled.is_none_or(|was| {
            was.batch != stepped.batch || (step_s - was.step_s).abs() > SAMPLE_CHANGE * was.step_s
        });
        if changed {
            // What was before must not soften the news.
            (tally.steps, tally.busy_s) = (0, 0.0);
        }
        tally.steps += stepped.steps;
        tally.busy_s += step_s * stepped.steps as f64;
        let late = live.sampled.is_some_and(|was| was.at.elapsed() >= every);
        if (changed || late) && tally.busy_s > 0.0 {
            let step_s = tally.busy_s / tally.steps as f64;
            let (busy, dram) = match reading {
                // What a GPU does is one tenant's doing where there is one tenant.
                Some(_) if !alone => (0.0, 0.0),
                Some(r) => r.counters.map_or((0.0, 0.0), |c| (c.sm_util.into(), c.dram.into())),
                None => (tally.busy(t), 0.0),
            };
            let sample = Sample {
                step_s,
                done: Some(stepped.done),
                sm_util: (busy / pace).min(1.0) as f32,
                dram_util: dram as f32,
                mem_mib: stepped.gpu_mib.unwrap_or(0),
                noise_scale: stepped.noise_scale.unwrap_or(0.0) as f32,
                batch: stepped.batch,
                ..Sample::default()
            };
            live.sampled = Some(Sampled { at: Instant::now(), step_s, batch: stepped.batch });
            live.tally = Some(Tally::new(t));
            self.facts.push(Event::Sampled { job, sample });
        }
        live.seen = Some(stepped);
    }

    /// The guard of a job that was promised a speed hears what it reports.
    fn watch_over(&mut self, job: JobIdx, stepped: &Stepped) {
        let state = self.engine.state();
        let hot = state.job(job);
        if hot.knobs.floor_permille == 0 || hot.phase != Phase::Running {
            return;
        }
        let moves = |other: JobIdx| {
            let live = &self.live[other.usize()];
            let runs = |t: &Tenant| t.aim == Aim::Run && t.told.pace_permille > 0;
            live.tenant.as_ref().is_some_and(runs) && !live.held
        };
        let roommates =
            || hot.gpus.iter().flat_map(|g| &state.gpu(*g).tenants).filter(|t| **t != job);
        let alone = !roommates().any(|t| moves(*t));
        let seat = |of: JobIdx| self.live[of.usize()].tenant.as_ref().and_then(|t| t.told.seat);
        let sits_apart = |other: &JobIdx| {
            let seats = seat(job).zip(seat(*other));
            seats.is_some_and(|(own, theirs)| !sm_partition::overlap(own, theirs))
        };
        let apart = roommates().next().is_some() && roommates().all(sits_apart);
        let now = Instant::now();
        let guard =
            self.guards.entry(job).or_insert_with(|| Guard::new(hot.knobs.floor_permille, now));
        let Stepped { steps, step_s, load_s, batch, .. } = *stepped;
        let load_s = load_s.unwrap_or(0.0).min(step_s);
        guard.hear(Report { steps, step_s, load_s, batch }, alone, apart, now);
    }

    pub(crate) fn peer_gone(&mut self, id: u64) {
        for idx in 0..self.live.len() {
            let of_peer = |t: &&mut Tenant| t.peer.as_ref().is_some_and(|p| p.id == id);
            let group = self.group(JobIdx::from_usize(idx));
            let share = self.live[idx].share;
            let Some(t) = self.live[idx].tenant.as_mut().filter(|t| of_peer(t)) else { continue };
            t.peer = None;
            // It may come back; until then it is held as one that never spoke.
            let allowed = Allowed::new(t.knobs, share);
            self.device.confine(&group, t.gpus.len(), allowed, false);
            let admitted = self.stages.forget(JobIdx::from_usize(idx));
            self.admit(&admitted);
        }
    }

    pub(crate) fn admit(&mut self, admitted: &[(JobIdx, u8)]) {
        for (job, stage) in admitted {
            let stage = protocol::STAGE_NAMES[usize::from(*stage)].to_string();
            if let Some(peer) = self.live[job.usize()].tenant.as_ref().and_then(|t| t.peer.as_ref())
            {
                peer.say(&ToTenant::Go(Stage { stage }));
            }
        }
    }

    /// Whether the job takes turns with roommates in the stages of its steps.
    pub(crate) fn is_interleaved(&self, job: JobIdx) -> bool {
        let state = self.engine.state();
        let takes_turns = |j: &JobIdx| state.job(*j).knobs.stage > 0;
        let mut tenants = state.job(job).gpus.iter().map(|g| &state.gpu(*g).tenants);
        tenants.any(|t| t.len() > 1 && t.iter().any(takes_turns))
    }
}

impl Tally {
    /// Begins with the next report.
    fn new(tenant: &Tenant) -> Self {
        Self { steps: 0, busy_s: 0.0, since: Instant::now(), cpu_s: tenant.cpu_s() }
    }

    /// The part of its devices that the process kept busy since.
    fn busy(&self, tenant: &Tenant) -> f64 {
        let whole_s = self.since.elapsed().as_secs_f64() * tenant.gpus.len().max(1) as f64;
        ((tenant.cpu_s() - self.cpu_s) / whole_s.max(1e-3)).clamp(0.0, 1.0)
    }
}
