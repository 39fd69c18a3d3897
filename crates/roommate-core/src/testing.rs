//! A slow, obviously correct world for tests: time advances in fixed ticks and every job is
//! advanced at every tick. The event-driven simulator is compared with it, and policies draw their
//! test pictures in it.

use crate::cluster::Cluster;
use crate::engine::Engine;
use crate::event::{Action, Event, Sample};
use crate::idx::{Idx, IdxVec, JobIdx, ProfileIdx, TeamIdx};
use crate::interference::Truth;
use crate::interference::stages::Interleaved;
use crate::interference::table::Table;
use crate::job::{Class, Spec};
use crate::journal::gantt::Gantt;
use crate::journal::metrics::{Fold, Metrics};
use crate::journal::{self, Head, JobLine, Observer, ProfileLine, StepView};
use crate::number::{Number, Number32};
use crate::performance::effective_speed::effective_speed;
use crate::performance::progress::work_s;
use crate::performance::throttle;
use crate::policy::{self, Params};
use crate::profile::Profile;
use crate::state::Costs;
use crate::time::{Span, Time};
use std::sync::Arc;

/// The confirmation from a world that carries out every action at once.
pub fn confirmation(action: &Action) -> Option<Event> {
    match action {
        Action::Start(job, _) | Action::Move(job, _) => Some(Event::Started(*job)),
        Action::Stop(job) | Action::Suspend(job) => {
            Some(Event::Stopped { job: *job, done: Number::of(0.0) })
        }
        Action::Tune(job, _) => Some(Event::Tuned(*job)),
        Action::Reject(..) => None,
    }
}

/// A job of a case.
#[derive(Clone, Debug)]
pub struct TestJob {
    /// Its name.
    pub name: String,
    /// When it is submitted, in ticks.
    pub submit: u64,
    /// What its user asks for.
    pub spec: Spec,
    /// Steps that it actually needs.
    pub work: f64,
}

/// A small cluster, some jobs and a policy.
pub struct TestCase {
    /// The cluster.
    pub cluster: Cluster,
    /// What changes cost; nothing by default.
    pub costs: Costs,
    /// Name of the policy.
    pub policy: String,
    /// Its parameters.
    pub params: Params,
    /// Profiles of the jobs.
    pub profiles: Vec<Profile>,
    /// The jobs, in order of submission.
    pub jobs: Vec<TestJob>,
    /// Length of a tick.
    pub tick: Span,
    /// Seed of the policy's randomness.
    pub seed: u64,
    /// How roommates really disturb each other.
    pub truth: Arc<dyn Truth>,
    /// The part of the truth that the policy knows; nothing by default.
    pub known_pairs: Option<Table>,
}

/// The result of a case.
pub struct Outcome {
    /// The journal, as text.
    pub journal: String,
    /// When each job finished, in ticks.
    pub finished: Vec<Option<u64>>,
    /// Whether all jobs ended before the limit.
    pub ended: bool,
}

/// Ticks after which a case is aborted.
const LIMIT: u64 = 100_000;

impl TestCase {
    /// Jobs as `name submit gpus length`, separated by commas; a tick is one second. A fifth word
    /// such as `.6/.3/.1` gives the shares of data, compute and network in a step.
    pub fn new(policy: &str, cluster: &str, lines: &str) -> Self {
        let mut jobs: Vec<TestJob> = Vec::new();
        let mut profiles = vec![Profile::of_step(1.0)];
        for job in lines.split(',') {
            let words: Vec<&str> = job.split_whitespace().collect();
            let [name, submit, gpus, length] = words[..words.len().min(4)] else {
                panic!("expected `name submit gpus length`, found {job:?}");
            };
            let profile = words.get(4).map_or(ProfileIdx(0), |stages| {
                profiles.push(staged(stages));
                ProfileIdx::from_usize(profiles.len() - 1)
            });
            let number = |w: &str| w.parse::<u64>().expect("a number");
            let work = number(length) as f64;
            jobs.push(TestJob {
                name: name.into(),
                submit: number(submit),
                spec: Spec::training(number(gpus) as u16, work, profile),
                work,
            });
        }
        jobs.sort_by_key(|a| a.submit);
        let free = Costs { restart: Span::ZERO, ..Costs::default() };
        Self {
            cluster: cluster.parse().expect("a cluster"),
            costs: free,
            policy: policy.into(),
            params: Params::new(),
            profiles,
            jobs,
            tick: Span::from_secs(1.0),
            seed: 0,
            truth: Arc::new(Interleaved::default()),
            known_pairs: None,
        }
    }

    /// The job that has this index in its runs.
    pub fn job(&self, job: JobIdx) -> &TestJob {
        &self.jobs[job.usize()]
    }

    /// The head of its journal in this world.
    pub fn head(&self, world: &str) -> Head {
        let run = (&*self.policy, self.params.clone());
        let head = Head::new(world, run, self.cluster.clone(), self.costs, self.seed);
        Head { known_pairs: self.known_pairs.clone(), ..head }
    }

    /// Runs the case to its end, or to the limit.
    pub fn run(&self) -> Outcome {
        self.run_looking(&mut |_| {})
    }

    /// Runs the case, and calls `look` after every step that called the policy.
    pub fn run_looking(&self, look: &mut dyn FnMut(&mut Engine)) -> Outcome {
        let policy = policy::find(&self.policy).and_then(|e| e.build(&self.params));
        let policy = policy.unwrap_or_else(|e| panic!("{e}"));
        self.run_policy(policy, look)
    }

    /// Runs the case with a policy that need not be in the registry.
    pub fn run_policy(
        &self,
        policy: Box<dyn policy::Policy>,
        look: &mut dyn FnMut(&mut Engine),
    ) -> Outcome {
        let engine = self.head("ticks").engine_with(policy);
        let mut stage = TickWorld { case: self, engine, jobs: IdxVec::new(), out: Vec::new() };
        let ended = stage.play(look);
        let TickWorld { jobs, out, .. } = stage;
        Outcome {
            journal: String::from_utf8(out).expect("journals are UTF-8"),
            finished: jobs.iter().map(|j| j.finished).collect(),
            ended,
        }
    }
}

fn started_in(facts: &[Event]) -> Vec<JobIdx> {
    let started = |f: &Event| if let Event::Started(job) = f { Some(*job) } else { None };
    facts.iter().filter_map(started).collect()
}

/// A profile with these shares of data, compute and network in a step of one second.
fn staged(shares: &str) -> Profile {
    let share = |s: &str| s.parse::<f64>().expect("a share of a step");
    let shares: Vec<f64> = shares.split('/').map(share).collect();
    let [data, compute, network] = shares[..] else { panic!("expected data/compute/network") };
    let mut profile = Profile::of_step(1.0);
    profile.stages_s = Some([data, 0.0, compute, network].map(Number::of));
    profile
}

#[derive(Clone, Debug, Default)]
struct Played {
    placed: bool,
    running: bool,
    /// Remaining ticks of the start-up cost.
    starting: u64,
    done: f64,
    /// Seconds per step's worth of work as the engine believes or as last reported to it.
    told_s: f64,
    /// The batch size and the noise scale last reported to the engine.
    told_batch: u32,
    told_noise: f32,
    /// Ticks for which the throttle that protects a roommate halts this job.
    held: u64,
    finished: Option<u64>,
    refused: bool,
}

struct TickWorld<'a> {
    case: &'a TestCase,
    engine: Engine,
    jobs: IdxVec<JobIdx, Played>,
    out: Vec<u8>,
}

impl TickWorld<'_> {
    fn play(&mut self, look: &mut dyn FnMut(&mut Engine)) -> bool {
        let case = self.case;
        let mut writer = journal::Writer::new(Vec::new());
        writer.head(&case.head("ticks"));
        writer.team(&journal::TeamLine { idx: TeamIdx(0), name: "all".into() });
        for profile in &case.profiles {
            let idx = self.engine.add_profile(profile.clone());
            writer.profile(&ProfileLine { idx, name: "work".into(), profile: profile.clone() });
        }
        let mut arrived = 0;
        let mut tick = 0;
        let ended = loop {
            let now = Time(tick * case.tick.0);
            let mut facts = self.completions(tick);
            while case.jobs.get(arrived).is_some_and(|a| a.submit == tick) {
                let job = &case.jobs[arrived];
                let idx = self.engine.add_job(job.spec.clone());
                let line = JobLine::new(idx, job.name.clone(), job.spec.clone());
                writer.job(&line);
                self.jobs.push(Played::default());
                facts.push(Event::Submitted(idx));
                arrived += 1;
            }
            self.steps(now, facts, &mut writer, look);
            let serves = |i: JobIdx| case.job(i).spec.class == Class::Service;
            let over = |(i, j): (JobIdx, &Played)| j.finished.is_some() || j.refused || serves(i);
            if arrived == case.jobs.len() && self.jobs.iter_enumerated().all(over) {
                // Services end with the training.
                let left = self.jobs.indices().filter(|i| serves(*i) && !self.jobs[*i].refused);
                let facts: Vec<Event> = left.map(Event::Cancelled).collect();
                if !facts.is_empty() {
                    let step = self.engine.step(now, &facts);
                    writer.step(&StepView::of(now, &facts, &step));
                }
                break true;
            }
            if tick == LIMIT {
                break false;
            }
            self.advance();
            tick += 1;
        };
        writer.end(Time(tick * case.tick.0));
        self.out = writer.finish().expect("writing to memory cannot fail");
        ended
    }

    fn completions(&mut self, tick: u64) -> Vec<Event> {
        let mut facts = Vec::new();
        for (i, job) in self.jobs.iter_mut().enumerate() {
            // Sums of ticks are not exact; a millionth of a step is negligible.
            if job.running && job.done >= self.case.jobs[i].work - 1e-6 {
                *job = Played { done: job.done, finished: Some(tick), ..Played::default() };
                facts.push(Event::Finished(JobIdx::from_usize(i)));
            }
        }
        facts
    }

    /// Repeats steps until the world has confirmed every action.
    fn steps(
        &mut self,
        now: Time,
        mut facts: Vec<Event>,
        to: &mut dyn Observer,
        look: &mut dyn FnMut(&mut Engine),
    ) {
        for (i, job) in self.jobs.iter_mut().enumerate() {
            if job.placed && !job.running && job.starting == 0 && job.finished.is_none() {
                job.running = true;
                (job.told_s, job.told_batch, job.told_noise) = (0.0, 0, 0.0);
                facts.push(Event::Started(JobIdx::from_usize(i)));
            }
        }
        self.begin_started(&facts);
        for job in started_in(&facts) {
            self.measure(job, &mut facts);
        }
        loop {
            let step = self.engine.step(now, &facts);
            let asked = step.asked;
            if asked || !facts.is_empty() {
                to.step(&StepView::of(now, &facts, &step));
            }
            let actions = step.actions.to_vec();
            if asked {
                look(&mut self.engine);
            }
            facts = actions.iter().filter_map(|a| self.act(a)).collect();
            self.begin_started(&facts);
            for job in self.jobs.indices() {
                self.measure(job, &mut facts);
            }
            if facts.is_empty() {
                return;
            }
        }
    }

    fn act(&mut self, action: &Action) -> Option<Event> {
        let idx = action.job();
        let job = &mut self.jobs[idx];
        match action {
            Action::Start(..) | Action::Move(..) => {
                let cost = match action {
                    Action::Move(..) => self.engine.state().move_cost(idx),
                    _ => self.engine.state().start_cost(idx),
                };
                job.placed = true;
                job.starting = cost.0.div_ceil(self.case.tick.0);
                job.running = job.starting == 0;
                (job.told_s, job.told_batch, job.told_noise) = (0.0, 0, 0.0);
                job.running.then_some(Event::Started(idx))
            }
            Action::Stop(_) | Action::Suspend(_) => {
                job.running = false;
                job.placed = false;
                Some(Event::Stopped { job: idx, done: Number::of(job.done) })
            }
            Action::Tune(..) => Some(Event::Tuned(idx)),
            Action::Reject(..) => {
                job.refused = true;
                None
            }
        }
    }

    /// Seconds per step of the job on its current GPUs, with its current roommates.
    fn pace(&self, idx: JobIdx) -> f64 {
        let state = self.engine.state();
        let held = |t: JobIdx| self.jobs[t].held > 0;
        let gpus = &state.job(idx).gpus;
        let speed = effective_speed(&*self.case.truth, state, idx, gpus, &held, &|_| false);
        state.alone_step_s(idx, gpus) / speed
    }

    /// The noise scale of its gradients now; 0 where it is not measured.
    fn noise_scale(&self, idx: JobIdx) -> f32 {
        let (state, job) = (self.engine.state(), self.case.job(idx));
        let noise = state.profile(idx).training.as_ref().map(|t| t.noise);
        noise.map_or(0.0, |n| n.at(n.stage(self.jobs[idx].done / job.work)))
    }

    /// Seconds for the work of one step at its own batch size.
    fn work_s(&self, idx: JobIdx) -> f64 {
        let state = self.engine.state();
        let training = state.profile(idx).training.as_ref();
        let worth =
            training.map_or(1.0, |t| t.goodput_factor(state.job(idx).knobs, self.noise_scale(idx)));
        work_s(self.pace(idx), worth)
    }

    /// Where throttles protect a job: a protected job that starts is measured with the others
    /// halted, and a best-effort job accelerates from standstill.
    fn begin_started(&mut self, facts: &[Event]) {
        for job in started_in(facts) {
            let state = self.engine.state();
            for gpu in &state.job(job).gpus {
                if !throttle::is_protected(state, *gpu) {
                    continue;
                }
                let settled = throttle::settled(&*self.case.truth, state, *gpu);
                for tenant in &state.gpu(*gpu).tenants {
                    let span = if state.job(job).knobs.floor_permille > 0 {
                        let gpus = &state.job(job).gpus;
                        throttle::hold(state.alone_step_s(job, gpus), settled)
                    } else {
                        throttle::climb(settled)
                    };
                    let concerned = *tenant == job || state.job(job).knobs.floor_permille > 0;
                    if concerned && state.job(*tenant).knobs.floor_permille == 0 {
                        let held = &mut self.jobs[*tenant].held;
                        *held = span.0.div_ceil(self.case.tick.0).max(*held);
                    }
                }
            }
        }
    }

    /// Reports to the engine if a step of the job takes another time than it believes.
    fn measure(&mut self, job: JobIdx, facts: &mut Vec<Event>) {
        if !self.jobs[job].running {
            return;
        }
        let state = self.engine.state();
        let step_s = self.pace(job).min(1e12);
        let work_s = self.work_s(job).min(1e12);
        let alone_s = state.alone_step_s(job, &state.job(job).gpus);
        let mut sample = Sample { step_s: Number::of(step_s), ..Sample::default() };
        if let Some(training) = &state.profile(job).training {
            sample.batch = training.batch_of(state.job(job).knobs);
            sample.noise_scale = Number32::of(self.noise_scale(job));
            sample.mem_mib = training.mem_mib(sample.batch).unwrap_or(0);
        }
        let told = &mut self.jobs[job];
        let news = told.told_batch != sample.batch || sample.noise_scale != told.told_noise;
        let believed_s = if told.told_s == 0.0 { alone_s } else { told.told_s };
        told.told_s = work_s;
        (told.told_batch, told.told_noise) = (sample.batch, sample.noise_scale.get());
        if work_s != believed_s || news {
            facts.push(Event::Sampled { job, sample });
        }
    }

    fn advance(&mut self) {
        let pace = |i: JobIdx| if self.jobs[i].running { self.work_s(i) } else { 1.0 };
        let paces: Vec<f64> = self.jobs.indices().map(pace).collect();
        for (job, step_s) in self.jobs.iter_mut().zip(paces) {
            if job.running {
                job.done += self.case.tick.secs() / step_s;
            } else if job.placed {
                job.starting -= 1;
            }
            job.held = job.held.saturating_sub(1);
        }
    }
}

impl Outcome {
    fn fold<O: Observer>(&self, mut fold: O) -> O {
        journal::read(self.journal.as_bytes(), &mut fold).unwrap_or_else(|e| panic!("{e}"));
        fold
    }

    /// Metrics of the run.
    pub fn metrics(&self) -> Metrics {
        self.fold(Fold::default()).metrics()
    }

    /// Gantt chart of the run.
    pub fn chart(&self) -> String {
        self.fold(Gantt::default()).chart(100, 64)
    }
}

/// Gantt chart of a policy with default parameters.
pub fn picture(policy: &str, cluster: &str, jobs: &str) -> String {
    picture_with(policy, "{}", cluster, jobs)
}

/// Gantt chart of a policy with these parameters (JSON).
pub fn picture_with(policy: &str, params: &str, cluster: &str, jobs: &str) -> String {
    let mut case = TestCase::new(policy, cluster, jobs);
    case.params = serde_json::from_str(params).expect("parameters are a JSON object");
    case.run().chart()
}
