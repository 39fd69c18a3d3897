//! Views of jobs and of the daemon for people: the engine's estimates and the machine's
//! observations together.

use crate::api::caller::Caller;
use crate::api::control::{self, JobView, MachineView, ServiceView};
use crate::api::job_file::service::Service;
use crate::daemon::Daemon;
use crate::device::range_words;
use crate::machine::serving::Serving;
use crate::machine::tenant::{Company, JobRuntime};
use roommate_core::idx::JobIdx;
use roommate_core::job::{Class, Job, Phase};
use roommate_core::journal::forecast::Guess;
use roommate_core::number::Number;
use roommate_core::performance::pairs;
use roommate_core::time::{Span, Time};
use std::fs;

/// A job of somebody else. The sentences of reasons have the word "job" before it.
const FOREIGN: &str = "of another user";

impl Daemon {
    /// A job as the caller sees it, who is its owner or an administrator.
    pub(super) fn job_view(&self, job: JobIdx, caller: &Caller) -> JobView {
        let (record, state) = (&self.jobs[job], self.engine.state());
        let (hot, spec) = (state.job(job), state.spec(job));
        let known = self.machine.job(job);
        let tenant = known.and_then(|j| j.tenant.as_ref());
        let seen = known.and_then(|j| j.seen.as_ref());
        let now = state.now.max(self.clock.now());
        let ended = hot.phase == Phase::Done;
        let until = if ended { hot.since } else { now };
        // A job carried over from an earlier part of the journal was submitted there.
        let first = record.row.submitted_unix_us.saturating_sub(self.epoch_us);
        let submitted = hot.submitted.min(Time(first));
        let done = self.done(job);
        let timed = (seen.is_some() && !ended) || record.row.file.step_s.is_some();
        let moves = hot.phase == Phase::Running && !hot.user.held;
        let left_s = spec.work.filter(|_| moves && timed);
        let left_s = left_s.map(|all| Number::of((all - done) * hot.meter.step_s));
        JobView {
            name: record.name.clone(),
            idx: record.id,
            owner: record.row.owner.clone(),
            state: self.state_of(job, hot, known),
            ended,
            devices: hot.gpus.iter().map(|g| g.0).collect(),
            wants: spec.gpus,
            share: self.share(job),
            pace: Number::of(f64::from(self.pace_permille(job)) / 1000.0),
            batch: seen.map(|s| s.batch),
            done,
            steps: spec.work,
            left_s: left_s.filter(|s| *s < 1e9),
            step_s: seen.map(|s| Number::of(s.step_s)),
            slowdown: seen.and_then(|s| self.slowdown(job, s.step_s)),
            believed: self.believed(job),
            stages_s: seen.and_then(|s| s.stages_s).map(|s| s.map(Number::of)),
            cpu_s: known.and_then(|j| j.cpu_s).map(Number::of),
            noise_scale: seen.and_then(|s| s.noise_scale).map(Number::of),
            mem_mib: seen.and_then(|s| s.mem_mib),
            gpu_mib: seen.and_then(|s| s.gpu_mib),
            seat: tenant.and_then(|t| t.range).map(range_words),
            apart: tenant.is_some_and(|t| t.company == Company::Apart),
            cooperative: known.is_some_and(JobRuntime::is_connected),
            starts: self.starts(job),
            failures: record.failures.saturating_add(hot.failures),
            submitted_s: Number::of(submitted.secs()),
            age_s: Number::of(Span(until.0.saturating_sub(submitted.0)).secs()),
            class: control::class_name(spec.class).into(),
            team: record.row.file.team.clone(),
            why: self
                .machine
                .lapse(job)
                .map(|l| l.to_string())
                .or_else(|| self.reason(hot, caller)),
            exit: known.and_then(|j| j.exit.as_ref()).map(ToString::to_string),
            keeper_pid: tenant.map(|t| t.supervisor.pid),
            pid: tenant.and_then(|t| self.machine.command_of(t)).map(|p| p.pid),
            log: self.config.paths.log(record.id).display().to_string(),
            command: control::shown_command(&record.row.file.command.words()),
            service: record.row.file.service.as_ref().map(|s| self.service_view(job, s)),
        }
    }

    fn service_view(&self, job: JobIdx, service: &Service) -> ServiceView {
        let (record, serving) = (&self.jobs[job], self.machine.serving(job));
        let front = service.front(&record.name);
        let more = serving.map(Serving::unreported).unwrap_or_default();
        let all = record.served.and(more);
        let lately = serving.map_or(all, Serving::lately);
        let last = serving.and_then(|s| s.last.as_ref());
        let connected = self.machine.job(job).is_some_and(JobRuntime::is_connected);
        let ms = |us: u32| Number::of(f64::from(us) / 1e3);
        ServiceView {
            model: front.model,
            objective_ms: Number::of(front.objective.ms),
            quantile: Number::of(front.objective.quantile),
            port: service.port,
            requests: all.requests,
            late: all.late,
            over_share: Number::of(all.late as f64 / all.requests.max(1) as f64),
            p50_ms: ms(lately.p50_us),
            p99_ms: ms(lately.p99_us),
            queued: last.map_or(0, |l| l.queued),
            held: Number::of(last.map_or(0.0, |l| f64::from(l.held_permille) / 1000.0)),
            ready: connected && last.is_some_and(|l| l.ready),
        }
    }

    /// The phase of a job as a word.
    fn state_of(&self, job: JobIdx, hot: &Job, known: Option<&JobRuntime>) -> String {
        match hot.phase {
            Phase::Expected | Phase::Pending if known.is_some_and(JobRuntime::is_suspended) => {
                "waits in memory"
            }
            Phase::Expected | Phase::Pending => "pending",
            Phase::BackingOff => "backing off",
            Phase::Starting => "starting",
            Phase::Running if hot.user.held => "suspended",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
            Phase::Done => {
                let outcome = self.jobs[job].outcome.clone();
                return outcome.unwrap_or_else(|| "ended".into());
            }
        }
        .into()
    }

    /// Steps done: as the job last reported, else the engine's estimate.
    fn done(&self, job: JobIdx) -> Number {
        let (state, known) = (self.engine.state(), self.machine.job(job));
        // The machine may still hold the last report of a job that has ended; the engine's figure
        // is final.
        let ended = state.job(job).phase == Phase::Done;
        let done = match known.and_then(|j| j.seen.as_ref()).filter(|_| !ended) {
            Some(seen) => seen.done,
            // The job is connected and has not reported a step yet.
            None if known.is_some_and(JobRuntime::is_connected) => self.jobs[job].checkpoint,
            None => state.done(job),
        };
        let most = state.spec(job).work.unwrap_or(Number::MOST);
        Number::of(done.min(most.get()))
    }

    /// The length of its steps relative to alone, as measured.
    fn slowdown(&self, job: JobIdx, step_s: f64) -> Option<Number> {
        let state = self.engine.state();
        let runs = state.job(job).phase == Phase::Running;
        pairs::measured_slowdown(state, job, step_s).filter(|_| runs).map(Number::of)
    }

    /// The same as the engine believes it, of a job with roommates.
    fn believed(&self, job: JobIdx) -> Option<Guess> {
        let state = self.engine.state();
        let placed = state.job(job).is_placed() && state.spec(job).class != Class::Service;
        placed.then(|| pairs::slowdown(state, job).into())
    }

    /// The job's share of each device: the policy's, or that of its user if it is smaller.
    fn share(&self, job: JobIdx) -> Number {
        let (hot, spec) = (self.engine.state().job(job), self.engine.state().spec(job));
        let knobs = if hot.is_placed() { hot.knobs } else { spec.knobs };
        let (given, user) = (knobs.sm_permille, hot.user.share_permille);
        let less = user > 0 && (given == 0 || user < given);
        Number::of(f64::from(if less { user } else { given }) / 1000.0)
    }

    /// The pace in force. A guard of a roommate may lower it below that of the job's knobs.
    fn pace_permille(&self, job: JobIdx) -> u16 {
        let own = self.engine.state().job(job).knobs.pace_permille;
        let tenant = self.machine.job(job).and_then(|j| j.tenant.as_ref());
        match tenant.zip(self.machine.own_pace_permille(job)) {
            Some((t, most)) if t.orders.pace_permille < most => t.orders.pace_permille,
            _ => own,
        }
    }

    /// Why the job waits or runs as it does. Jobs of others are not named.
    fn reason(&self, hot: &Job, caller: &Caller) -> Option<String> {
        let name = |j: JobIdx| self.name_for(j, caller);
        if hot.phase == Phase::Done {
            return None;
        }
        hot.last_reason.map(|r| r.describe(&name)).or_else(|| {
            let reason = match hot.phase {
                Phase::Pending if !hot.parked_on.is_empty() => "other jobs have their time slice",
                Phase::Pending => "the policy has not placed it yet",
                _ => return None,
            };
            Some(reason.into())
        })
    }

    /// The name of a job in a text for the caller.
    fn name_for(&self, job: JobIdx, caller: &Caller) -> String {
        let record = &self.jobs[job];
        let known = caller.sees(&record.row.owner);
        if known { record.name.clone() } else { FOREIGN.into() }
    }

    pub(super) fn machine_view(&self, caller: &Caller) -> MachineView {
        let why = self.head.continues.as_ref();
        let why = why.map_or(String::new(), |why| format!(", begun because {why}"));
        let mib = self.store.bytes() as f64 / f64::from(1 << 20);
        let about = |job: Option<JobIdx>| match job {
            Some(job) => caller.sees(&self.jobs[job].row.owner),
            None => caller.admin,
        };
        MachineView {
            pid: std::process::id(),
            policy: self.head.policy.clone(),
            cluster: self.head.cluster.to_string(),
            devices: self.head.cluster.gpus(),
            enforcement: self.machine.enforcement().clone(),
            up_s: Number::of(self.clock.now().secs()),
            jobs: self.jobs.iter().filter(|j| j.outcome.is_none()).count(),
            rss_mib: Number::of(rss_mib()),
            journal: format!("part {}, {mib:.1} MiB{why}", self.store.part()),
            http: self.http.clone(),
            gpus: self.machine.gpus(),
            recent: self.log.lines(&about, &|job| self.name_for(job, caller)),
            notices: self.store.notices().to_vec(),
        }
    }
}

/// Resident memory of this process.
fn rss_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok()).unwrap_or(0.0)
        / 1024.0
}
