//! A world for tests of policies with services. The test reports facts, every action is confirmed
//! at once, and the outcome is recorded as text. A policy that is called again on the same state
//! must not change anything.

use crate::engine::Engine;
use crate::event::{Action, Event, Sample};
use crate::idx::{IdxVec, JobIdx};
use crate::interference::Undisturbed;
use crate::job::{Class, Phase, Slo, Spec};
use crate::knobs::Knobs;
use crate::number::{Number, Number32};
use crate::policy;
use crate::profile::{Predicted, Profile, Profiled, Serving};
use crate::state::Costs;
use crate::time::{Span, Time};
use std::fmt::Write as _;

pub(crate) struct ServingWorld {
    pub(crate) engine: Engine,
    now: Time,
    wake: Option<Time>,
    names: IdxVec<JobIdx, String>,
    pub(crate) outcome: String,
    /// Reasons since the last entry of the outcome.
    reasons: Vec<String>,
}

/// Seconds of a batch alone: a fixed part, and work that is divided among SMs.
fn batch_s(batch: u32, share: f64) -> f64 {
    0.004 + 0.000_5 * f64::from(batch) / share.min(0.2 + 0.01 * f64::from(batch))
}

impl ServingWorld {
    /// The same scenario of two services and two training tasks for every policy.
    pub(crate) fn of_two_services(policy: &str) -> Self {
        let mut world = Self::new(policy, "{}", "1x2");
        let (light, heavy) = (world.service("light", 200), world.service("heavy", 100));
        world.train("a", 0.8, 0.3);
        world.says("no requests yet");
        world.sampled(light, 10.0, 40.0);
        world.sampled(heavy, 300.0, 60.0);
        world.says("requests arrive");
        world.sampled(heavy, 300.0, 150.0);
        world.says("heavy misses its SLO");
        world.wait(60.0);
        world.sampled(heavy, 300.0, 60.0);
        world.train("b", 0.2, 0.1);
        world.wait(600.0);
        world.says("later");
        world
    }

    pub(crate) fn new(policy: &str, params: &str, cluster: &str) -> Self {
        let params = serde_json::from_str(params).unwrap();
        let policy = policy::find(policy).unwrap().build(&params).unwrap();
        let cluster = cluster.parse().unwrap();
        let engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 1);
        let (now, wake) = (Time::ZERO, None);
        Self { engine, now, wake, names: IdxVec::new(), outcome: String::new(), reasons: vec![] }
    }

    fn add(&mut self, name: &str, profile: Profile, spec: impl Fn(Spec) -> Spec) -> JobIdx {
        let profile = self.engine.add_profile(profile);
        let job = self.engine.add_job(spec(Spec::training(1, 1e9, profile)));
        self.names.push(name.into());
        self.step(&[Event::Submitted(job)]);
        job
    }

    /// A service with this SLO whose latency was profiled at all batch sizes and shares.
    pub(crate) fn service(&mut self, name: &str, slo_ms: u32) -> JobIdx {
        let shares = [60, 120, 180, 300, 480, 730, 1000u16];
        let point = |batch: u32, sm_permille: u16| {
            let seconds = batch_s(batch, f64::from(sm_permille) / 1000.0);
            Profiled { batch, sm_permille, seconds }
        };
        let points = [1, 4, 16, 64].into_iter().flat_map(|b| shares.map(|s| point(b, s)));
        self.service_with(name, slo_ms, points.collect())
    }

    pub(crate) fn service_with(
        &mut self,
        name: &str,
        slo_ms: u32,
        points: Vec<Profiled>,
    ) -> JobIdx {
        let mut profile = Profile::of_step(batch_s(16, 1.0));
        profile.serving = Some(Serving {
            batch: 16,
            timeout: Span::from_secs(f64::from(slo_ms) / 1e4),
            warm_up: Span::ZERO,
            base_mib: 1000.0,
            item_mib: 10.0,
        });
        profile.latency = (!points.is_empty()).then(|| points.into());
        let knobs = Knobs { mem_mib: 1160, ..Knobs::WHOLE };
        let slo = Some(Slo { p99_us: slo_ms * 1000 });
        self.add(name, profile, |spec| Spec {
            class: Class::Service,
            work: None,
            slo,
            knobs,
            ..spec
        })
    }

    /// A training task with this utilisation.
    pub(crate) fn train(&mut self, name: &str, sm_util: f64, dram_util: f64) -> JobIdx {
        self.train_with(name, sm_util, dram_util, 0)
    }

    pub(crate) fn train_with(&mut self, name: &str, sm: f64, dram: f64, mem_mib: u32) -> JobIdx {
        let mut profile = Profile::of_step(0.1);
        let predicted =
            Predicted { sm_util: sm, sm_util_max: sm, std: 0.0, dram_util: dram, mem_mib };
        profile.predicted = Some(predicted);
        let knobs = Knobs { mem_mib, ..Knobs::WHOLE };
        self.add(name, profile, |spec| Spec { knobs, ..spec })
    }

    /// Reports a window of a service: requests per second, and the 99th percentile of latency.
    pub(crate) fn sampled(&mut self, job: JobIdx, load_rps: f32, p99_ms: f64) {
        self.sampled_slow(job, load_rps, p99_ms, 1.0);
    }

    /// The same, with batches that take `times` as long as alone.
    pub(crate) fn sampled_slow(&mut self, job: JobIdx, load_rps: f32, p99_ms: f64, times: f64) {
        let knobs = self.engine.state().job(job).knobs;
        let batch = if knobs.batch == 0 { 16 } else { knobs.batch };
        let sample = Sample {
            step_s: Number::of(times * batch_s(batch, knobs.reach())),
            p99_us: (p99_ms * 1e3) as u32,
            load_rps: Number32::of(load_rps),
            ..Sample::default()
        };
        // A sample at the time of a decision would count as its result.
        self.now += Span::from_secs(1.0);
        self.step(&[Event::Sampled { job, sample }]);
    }

    pub(crate) fn ends(&mut self, job: JobIdx) {
        self.step(&[Event::Finished(job)]);
    }

    /// Lets time pass; the policy is woken at the times that it set.
    pub(crate) fn wait(&mut self, seconds: f64) {
        let until = self.now + Span::from_secs(seconds);
        while let Some(wake) = self.wake.filter(|w| *w <= until) {
            self.now = wake;
            self.step(&[]);
        }
        self.now = until;
        self.step(&[]);
    }

    /// Reports facts, confirms the actions, and checks that a second look changes nothing.
    fn step(&mut self, facts: &[Event]) {
        let mut facts = facts.to_vec();
        loop {
            let step = self.engine.step(self.now, &facts);
            assert!(step.contradictions.is_empty(), "{:?}", step.contradictions);
            let (actions, notes) = (step.actions.to_vec(), step.notes.to_vec());
            let asked = step.asked;
            self.wake = step.wake;
            let names = |j: JobIdx| self.names[j].clone();
            self.reasons.extend(
                notes.iter().map(|n| format!("  {} {}\n", names(n.job), n.reason.describe(&names))),
            );
            if asked {
                let again = self.engine.look_again();
                assert!(again.actions.is_empty(), "a second look: {:?}", again.actions);
                self.wake = again.wake;
            }
            if actions.is_empty() {
                return;
            }
            facts = actions.iter().map(|a| self.confirmed(a)).collect();
            facts.extend(self.paces());
        }
    }

    fn confirmed(&self, action: &Action) -> Event {
        match action {
            Action::Start(job, _) | Action::Move(job, _) => Event::Started(*job),
            Action::Tune(job, _) => Event::Tuned(*job),
            Action::Stop(job) | Action::Suspend(job) => {
                let done = self.engine.state().job(*job).meter.done;
                let done = Number::of(done);
                Event::Stopped { job: *job, done }
            }
            Action::Reject(..) => panic!("no job is rejected here"),
        }
    }

    /// Samples of training: its step time with its share.
    fn paces(&self) -> Vec<Event> {
        let state = self.engine.state();
        let running = state.placed.iter().filter(|j| state.job(*j).phase == Phase::Running);
        let training = running.filter(|j| state.spec(*j).class != Class::Service);
        let pace = |job: JobIdx| {
            let share = state.job(job).knobs.reach();
            let sample = Sample { step_s: Number::of(0.1 / share.sqrt()), ..Sample::default() };
            Event::Sampled { job, sample }
        };
        training.map(pace).collect()
    }

    /// Adds an entry to the outcome: the reasons since the last one, and the tenants of each GPU
    /// with their knobs.
    pub(crate) fn says(&mut self, title: &str) {
        let _ = writeln!(self.outcome, "{title}, {}", self.now);
        self.outcome.extend(self.reasons.drain(..));
        let state = self.engine.state();
        for (idx, gpu) in state.gpus.iter_enumerated() {
            let _ = write!(self.outcome, "  GPU {idx}:");
            for job in &gpu.tenants {
                let Knobs { batch, sm_permille, mem_mib, .. } = state.job(*job).knobs;
                let _ = write!(self.outcome, " {} {sm_permille} ‰", self.names[*job]);
                if batch > 0 {
                    let _ = write!(self.outcome, " batch {batch}");
                }
                if mem_mib > 0 && state.spec(*job).class != Class::Service {
                    let _ = write!(self.outcome, " {mem_mib} MiB");
                }
            }
            self.outcome.push('\n');
        }
        let waiting: Vec<&str> = state.pending.iter().map(|j| self.names[j].as_str()).collect();
        if !waiting.is_empty() {
            let _ = writeln!(self.outcome, "  waiting: {}", waiting.join(" "));
        }
    }
}
