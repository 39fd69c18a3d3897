//! What a journal's writer writes, its reader reads: every fact, action and reason, and everything
//! that is registered, with whatever numbers a world comes to.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use proptest::collection::vec;
use proptest::prelude::*;
use roommate_core::event::{Action, Event, Placement, Sample, Served};
use roommate_core::idx::{GpuIdx, GpuSet, JobIdx, NodeIdx, ProfileIdx, TeamIdx};
use roommate_core::interference::table::Table;
use roommate_core::job::{Class, Retries, Slo, Spec};
use roommate_core::journal::{
    self, Head, JobLine, LIVE, Observer, ProfileLine, StepLine, StepView, TeamLine, Writer,
};
use roommate_core::knobs::Knobs;
use roommate_core::number::{Number, Number32, Positive};
use roommate_core::performance::goodput::{LrRule, Noise, Training};
use roommate_core::performance::sensitivity::{Host, Sensitivity};
use roommate_core::policy::Params;
use roommate_core::profile::{Predicted, Profile, Profiled, Serving};
use roommate_core::reason::{Note, Reason};
use roommate_core::state::{Charge, Costs, Quirks};
use roommate_core::time::{Span, Time};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Floats that computations come to.
fn float() -> impl Strategy<Value = f64> {
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, 1e-320, -0.0, 1e15, 1e-9];
    prop_oneof![any::<f64>(), 0.0..1e3, proptest::sample::select(odd.to_vec())]
}

/// Hands out numbers, again from the first after the last.
struct Dice {
    floats: Vec<f64>,
    wholes: Vec<u64>,
    rolls: usize,
}

impl Dice {
    fn float(&mut self) -> f64 {
        self.rolls += 1;
        self.floats[self.rolls % self.floats.len()]
    }

    fn whole(&mut self) -> u64 {
        self.rolls += 1;
        self.wholes[self.rolls % self.wholes.len()]
    }

    fn below(&mut self, n: u64) -> u32 {
        (self.whole() % n) as u32
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    fn number(&mut self) -> Number {
        Number::of(self.float())
    }

    fn positive(&mut self) -> Positive {
        Positive::of(self.float())
    }

    fn small(&mut self) -> Number32 {
        Number32::of(self.float() as f32)
    }

    /// A float of a field that no type bounds; such a field has to be finite.
    fn finite(&mut self) -> f64 {
        let float = self.float();
        if float.is_finite() { float } else { 0.0 }
    }

    fn finite32(&mut self) -> f32 {
        let float = self.float() as f32;
        if float.is_finite() { float } else { 0.0 }
    }

    fn maybe<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let value = make(self);
        (self.below(3) > 0).then_some(value)
    }

    fn span(&mut self) -> Span {
        Span(self.whole())
    }

    fn job(&mut self) -> JobIdx {
        JobIdx(self.below(JOBS))
    }

    fn knobs(&mut self) -> Knobs {
        Knobs {
            batch: self.whole() as u32,
            sm_permille: self.below(1001) as u16,
            sm_most_permille: 1 + self.below(1000) as u16,
            priority: self.coin(),
            pace_permille: self.below(1001) as u16,
            floor_permille: self.below(1001) as u16,
            turns: self.coin(),
            mem_mib: self.whole() as u32,
            cpu_milli: self.whole() as u32,
            host_mib: self.whole() as u32,
            stage: self.whole() as u8,
            fill_us: self.whole() as u32,
        }
    }

    fn placement(&mut self) -> Placement {
        let gpus = GpuSet::from_slice(&[GpuIdx(self.below(4)), GpuIdx(4 + self.below(4))]);
        Placement { gpus, knobs: self.knobs() }
    }

    fn head(&mut self) -> Head {
        let cluster = ["4x2", "4x2:a100/80g=1.7:96c:62.5g", "3x4:h200/143771m=1:16c"];
        let cluster = cluster[self.below(3) as usize].parse().unwrap();
        let charge = [Charge::OnRestart, Charge::EveryStep, Charge::EveryStepTogether];
        let quirks = Quirks {
            charge: charge[self.below(3) as usize],
            round: self.maybe(Self::span),
            ends_together: self.coin(),
        };
        let costs = Costs {
            start: self.span(),
            restart: self.span(),
            resume: self.span(),
            migrate: self.maybe(Self::span),
            tune: self.span(),
            host_mib_s: self.whole() as u32,
            backoff: self.span(),
            quiet_start: self.coin(),
            max_tenants: 1 + self.below(16) as u8,
            quirks,
        };
        let params = Params::from_iter([("slice_s".to_string(), json!(self.float()))]);
        let pair = [self.float(), self.float()];
        let pairs = BTreeMap::from([((ProfileIdx(0), ProfileIdx(1)), pair)]);
        let missing = self.float();
        let head = Head::new(LIVE, ("fifo", params), cluster, costs, self.whole());
        let known_pairs = self.maybe(|_| Table::new(pairs, missing));
        Head { known_pairs, continues: self.maybe(|_| "\u{1b}\0 ü\n".into()), ..head }
    }

    fn profile(&mut self) -> Profile {
        let usual = Host { cpu_milli: 1 + self.below(1000), mib: 1 + self.below(1000) };
        let best = Host { cpu_milli: 2000, mib: 2000 };
        let speedup = self.float();
        Profile {
            step_s: self.positive(),
            step_unknown: self.coin(),
            kind: None,
            model_speed: [(self.whole() as u8, self.positive()), (7, self.positive())].into(),
            spread_speed: self.positive(),
            scaling: self.maybe(|d| d.finite().clamp(0.0, 2.0)),
            skew: self.maybe(Self::finite32),
            stages_s: self.maybe(|d| std::array::from_fn(|_| d.number())),
            start: self.maybe(Self::span),
            restart: self.maybe(Self::span),
            predicted: self.maybe(|d| Predicted {
                sm_util: d.finite(),
                sm_util_max: d.finite(),
                std: d.finite(),
                dram_util: d.finite(),
                mem_mib: d.whole() as u32,
            }),
            sensitivity: Sensitivity::of_best(usual, best, speedup).map(Box::new),
            serving: self.maybe(|d| Serving {
                batch: d.whole() as u32,
                timeout: d.span(),
                warm_up: d.span(),
                base_mib: d.finite32(),
                item_mib: d.finite32(),
            }),
            training: self.maybe(|d| Training {
                batch: d.whole() as u32,
                batch_min: d.whole() as u32,
                batch_max: d.whole() as u32,
                lr: [LrRule::Linear, LrRule::SquareRoot, LrRule::Keep][d.below(3) as usize],
                noise: Noise { start: d.finite32(), end: d.finite32() },
                memory: vec![(d.whole() as u32, d.whole() as u32)],
            }),
            latency: self.maybe(|d| {
                let (batch, sm_permille) = (d.whole() as u32, d.whole() as u16);
                [Profiled { batch, sm_permille, seconds: d.finite() }].into()
            }),
        }
    }

    fn spec(&mut self) -> Spec {
        let gpus = 1 + self.below(100) as u16;
        Spec {
            gpus,
            gpus_max: gpus + self.below(9) as u16,
            knobs: self.knobs(),
            profile: ProfileIdx(self.below(PROFILES)),
            team: TeamIdx(0),
            class: [Class::Guaranteed, Class::BestEffort, Class::Service][self.below(3) as usize],
            work: self.maybe(Self::number),
            declared_s: self.maybe(Self::number),
            deadline: self.maybe(|d| Time(d.whole())),
            deadline_values: vec![(Time(self.whole()), self.number())],
            slo: self.maybe(|d| Slo { p99_us: d.whole() as u32 }),
            max_slowdown: self.maybe(|d| Number::of(1.0 + f64::from(d.below(9)))),
            weight: self.number(),
            gpu_models: self.whole() as u32,
            retries: Retries {
                user: self.whole() as u16,
                infra: self.whole() as u16,
                unknown: self.whole() as u16,
            },
            gpus_per_task: [1, gpus][self.below(2) as usize],
        }
    }

    fn sample(&mut self) -> Sample {
        Sample {
            step_s: self.number(),
            done: self.maybe(Self::number),
            sm_util: self.small(),
            dram_util: self.small(),
            mem_mib: self.whole() as u32,
            p99_us: self.whole() as u32,
            load_rps: self.small(),
            noise_scale: self.small(),
            batch: self.whole() as u32,
            alone: self.coin(),
        }
    }

    fn served(&mut self) -> Served {
        Served {
            windows: self.whole() as u32,
            over: self.whole() as u32,
            requests: self.whole(),
            late: self.whole(),
            p50_us: self.whole() as u32,
            p99_us: self.whole() as u32,
            worst_us: self.whole() as u32,
        }
    }

    /// Every reason: each is a word, a word with a number, or a word with some of these fields.
    fn reasons(&mut self) -> Vec<Reason> {
        let job = self.below(JOBS);
        let mut fields = json!({ "job": job, "than_beside": job, "source": "learnt" });
        let counts = ["need", "idle", "exist", "pd_permille", "saves", "batch", "measured"];
        let parts = ["own_permille", "cost_permille", "gain_permille", "times_permille"];
        let more = ["from_permille", "to_permille", "permille"];
        for field in counts.into_iter().chain(parts).chain(more) {
            fields[field] = self.below(1 << 16).into();
        }
        (fields["from"], fields["to"]) = (self.below(1 << 32).into(), self.below(1 << 32).into());
        (fields["by"], fields["could"]) = (self.whole().into(), self.maybe(Self::whole).into());
        let shapes = |tag: String| {
            let alone = [Value::from(tag.as_str()), json!({ tag.as_str(): &fields })];
            alone.into_iter().chain((0..JOBS).map(move |n| json!({ tag.as_str(): n })))
        };
        let read = |tag: String| {
            let reasons: Vec<Reason> =
                shapes(tag.clone()).filter_map(|v| serde_json::from_value(v).ok()).collect();
            let near = reasons.get(self.rolls % reasons.len().max(1)).copied();
            near.unwrap_or_else(|| panic!("nothing makes the reason {tag}"))
        };
        variants::<Reason>().into_iter().map(read).collect()
    }

    /// Every fact.
    fn facts(&mut self) -> Vec<Event> {
        let [reason, ..] = self.reasons()[..] else { panic!("there are reasons") };
        let node = NodeIdx(0);
        vec![
            Event::Submitted(self.job()),
            Event::Started(self.job()),
            Event::Stopped { job: self.job(), done: self.number() },
            Event::Tuned(self.job()),
            Event::Finished(self.job()),
            Event::Failed { job: self.job(), reason, done: self.number() },
            Event::Cancelled(self.job()),
            Event::Withdrawn(self.job()),
            Event::Sampled { job: self.job(), sample: self.sample() },
            Event::Served { job: self.job(), served: self.served() },
            Event::Noted { job: self.job(), reason },
            Event::Held { job: self.job(), held: self.coin() },
            Event::Resized {
                job: self.job(),
                batch: self.maybe(|d| d.whole() as u32),
                share_permille: self.maybe(|d| d.whole() as u16),
            },
            Event::NodeUp(node),
            Event::NodeDown(node),
            Event::NodeRoom { node, cpu_milli: self.whole() as u32, host_mib: self.whole() as u32 },
        ]
    }

    /// Every action.
    fn actions(&mut self) -> Vec<Action> {
        let [.., reason] = self.reasons()[..] else { panic!("there are reasons") };
        vec![
            Action::Stop(self.job()),
            Action::Suspend(self.job()),
            Action::Reject(self.job(), reason),
            Action::Tune(self.job(), self.knobs()),
            Action::Move(self.job(), self.placement()),
            Action::Start(self.job(), self.placement()),
        ]
    }
}

const JOBS: u64 = 3;
const PROFILES: u64 = 2;

/// The names of all variants of an enum, from serde's message about one that does not exist.
fn variants<T: serde::de::DeserializeOwned>() -> Vec<String> {
    let error = serde_json::from_str::<T>(r#""no such""#).err().unwrap().to_string();
    let names: Vec<String> = error.split('`').skip(3).step_by(2).map(String::from).collect();
    assert!(names.len() > 5, "{error}");
    names
}

/// The name of a variant as it is written.
fn tag(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value).unwrap() {
        Value::String(tag) => tag,
        Value::Object(map) => map.into_iter().next().unwrap().0,
        other => panic!("{other}"),
    }
}

/// A journal as lines.
#[derive(Debug, Default, PartialEq)]
struct Lines {
    head: Option<Head>,
    profiles: Vec<ProfileLine>,
    teams: Vec<TeamLine>,
    jobs: Vec<JobLine>,
    steps: Vec<StepLine>,
    end: Option<Time>,
}

impl Observer for Lines {
    fn head(&mut self, head: &Head) {
        self.head = Some(head.clone());
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.clone());
    }
    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.clone());
    }
    fn job(&mut self, line: &JobLine) {
        self.jobs.push(line.clone());
    }
    fn step(&mut self, step: &StepView<'_>) {
        let StepView { at, facts, actions, notes, asked, by } = *step;
        let by = by.map(str::to_string);
        let (facts, actions, notes) = (facts.to_vec(), actions.to_vec(), notes.to_vec());
        self.steps.push(StepLine { at, facts, actions, notes, asked, by });
    }
    fn end(&mut self, at: Time) {
        self.end = Some(at);
    }
}

impl Lines {
    fn of(dice: &mut Dice) -> Self {
        let name = |i: u32| format!("{i}\u{1b}\0\"\\\n");
        let profile = |i, dice: &mut Dice| {
            let (idx, profile) = (ProfileIdx(i), dice.profile());
            ProfileLine { idx, name: name(i), profile }
        };
        let job = |i, dice: &mut Dice| JobLine {
            idx: JobIdx(i),
            name: name(i),
            spec: dice.spec(),
            owner: (dice.below(2) == 0).then(|| name(i)),
            on: (dice.below(4) == 0).then(|| dice.placement()),
        };
        let notes = dice.reasons().into_iter().map(|reason| Note { job: dice.job(), reason });
        let notes = notes.collect();
        let at = Time(dice.whole() % (Time::LATEST.0 + 1));
        let (facts, actions, asked) = (dice.facts(), dice.actions(), dice.coin());
        Self {
            head: Some(dice.head()),
            profiles: (0..PROFILES as u32).map(|i| profile(i, dice)).collect(),
            teams: vec![TeamLine { idx: TeamIdx(0), name: name(0) }],
            jobs: (0..JOBS as u32).map(|i| job(i, dice)).collect(),
            steps: vec![StepLine { at, facts, actions, notes, asked, by: Some(name(7)) }],
            end: Some(at),
        }
    }

    fn write(&self) -> std::io::Result<Vec<u8>> {
        let mut writer = Writer::new(Vec::new());
        writer.head(self.head.as_ref().unwrap());
        self.profiles.iter().for_each(|line| writer.profile(line));
        self.teams.iter().for_each(|line| writer.team(line));
        self.jobs.iter().for_each(|line| writer.job(line));
        for StepLine { at, facts, actions, notes, asked, by } in &self.steps {
            let by = by.as_deref();
            writer.step(&StepView { at: *at, facts, actions, notes, asked: *asked, by });
        }
        writer.end(self.end.unwrap());
        writer.finish()
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back_equal(
        floats in vec(float(), 1..40),
        wholes in vec(any::<u64>(), 1..40),
    ) {
        let lines = Lines::of(&mut Dice { floats, wholes, rolls: 0 });
        let text = lines.write().unwrap();
        let mut read = Lines::default();
        let outcome = journal::read(&text[..], &mut read).map_err(|e| e.to_string());
        prop_assert_eq!(outcome, Ok(()), "{}", String::from_utf8_lossy(&text));
        prop_assert_eq!(&read, &lines);
        prop_assert_eq!(read.write().unwrap(), text);
    }

    /// Where no type bounds a number, the writer refuses the line.
    #[test]
    fn what_cannot_be_read_is_not_written(
        bad in proptest::sample::select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY]),
        field in 0..11_usize,
        floats in vec(float(), 1..40),
    ) {
        let mut lines = Lines::of(&mut Dice { floats, wholes: vec![1, 2, 4, 5], rolls: 0 });
        let profile = &mut lines.profiles[1].profile;
        let zero = Predicted { sm_util: 0.0, sm_util_max: 0.0, std: 0.0, dram_util: 0.0, mem_mib: 0 };
        let (timeout, warm_up) = (Span::ZERO, Span::ZERO);
        let serving = Serving { batch: 1, timeout, warm_up, base_mib: 0.0, item_mib: 0.0 };
        let training = Training::around(8, 0.0);
        match field {
            0 => profile.scaling = Some(bad),
            1 => profile.skew = Some(bad as f32),
            2 => profile.predicted = Some(Predicted { sm_util: bad, ..zero }),
            3 => profile.predicted = Some(Predicted { sm_util_max: bad, ..zero }),
            4 => profile.predicted = Some(Predicted { std: bad, ..zero }),
            5 => profile.predicted = Some(Predicted { dram_util: bad, ..zero }),
            6 => profile.serving = Some(Serving { base_mib: bad as f32, ..serving }),
            7 => profile.serving = Some(Serving { item_mib: bad as f32, ..serving }),
            8 => profile.training = Some(Training {
                noise: Noise { start: bad as f32, end: 0.0 }, ..training
            }),
            9 => profile.training = Some(Training {
                noise: Noise { start: 0.0, end: bad as f32 }, ..training
            }),
            _ => profile.latency = Some([Profiled {
                batch: 1, sm_permille: 1, seconds: bad
            }].into()),
        }
        let error = lines.write().unwrap_err();
        prop_assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{}", error);
    }
}

#[test]
fn every_fact_action_and_reason_is_tried() {
    let mut dice = Dice { floats: vec![1.0], wholes: (0..40).collect(), rolls: 0 };
    let sorted = |mut tags: Vec<String>| {
        tags.sort();
        tags
    };
    let facts = dice.facts().iter().map(tag).collect();
    assert_eq!(sorted(facts), sorted(variants::<Event>()));
    let actions = dice.actions().iter().map(tag).collect();
    assert_eq!(sorted(actions), sorted(variants::<Action>()));
    let reasons = dice.reasons().iter().map(tag).collect();
    assert_eq!(sorted(reasons), sorted(variants::<Reason>()));
}

/// The quotient of a length by steps that take almost no time, which an engine comes to when a
/// world says so.
#[test]
fn an_engine_comes_to_numbers_that_can_be_written() {
    let run = ("fifo", Params::new());
    let head = Head::new(LIVE, run, "1x1".parse().unwrap(), Costs::default(), 0);
    for step_s in [1e-320, 1e-9, 1e308, f64::INFINITY] {
        let mut engine = head.engine().unwrap();
        let profile = engine.add_profile(Profile::of_step(step_s));
        let job = engine.add_job(Spec::training(1, 1e300, profile));
        engine.step(Time::ZERO, &[Event::Submitted(job)]);
        let sample = Sample { step_s: Number::of(step_s), ..Sample::default() };
        engine.step(Time::ZERO, &[Event::Started(job), Event::Sampled { job, sample }]);
        for at in [1, Time::LATEST.0] {
            engine.step(Time(at), &[]);
            let done = engine.state().done(job);
            assert!(done.is_finite() && done >= 0.0, "{step_s}: {done}");
            assert!(engine.state().remaining_s(job).is_some_and(f64::is_finite));
        }
    }
}
