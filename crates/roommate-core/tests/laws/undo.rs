//! Undo restores the state exactly, at any depth and also inside a real policy.

use crate::canary::random_edit;
use crate::faulty_run::{Broken, FaultyRun, Law, play};
use crate::{Build, first_difference, from_registry, random};
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event};
use roommate_core::idx::{GpuIdx, Idx, JobIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::math::rng::Rng;
use roommate_core::plan::{Draft, News, Plan};
use roommate_core::policy::{POLICIES, Policy};
use roommate_core::state::State;
use roommate_core::time::{Span, Time};

/// Everything about a plan that is visible from outside.
fn seen(plan: &Plan<'_>) -> (State, Vec<Vec<GpuIdx>>) {
    let was = |j: usize| plan.was_on(JobIdx::from_usize(j)).to_vec();
    ((**plan).clone(), (0..plan.jobs.len()).map(was).collect())
}

/// Random edits, a mark, more edits, an undo; with marks inside marks.
fn scribble(plan: &mut Plan<'_>, rng: &mut Rng, depth: u32) -> Result<(), Broken> {
    for _ in 0..rng.below(5) {
        random_edit(plan, rng);
    }
    let mark = plan.mark();
    let before = seen(plan);
    for _ in 0..rng.below(8) {
        random_edit(plan, rng);
    }
    if depth > 0 {
        scribble(plan, rng, depth - 1)?;
    }
    plan.undo_to(mark);
    Broken::unless(seen(plan) == before, Law::Undo, || {
        first_difference(&format!("{before:#?}"), &format!("{:#?}", seen(plan)))
    })
}

/// A state with jobs in all phases on some of the GPUs.
fn some_state(seed: u64) -> State {
    let entry = &POLICIES[seed as usize % POLICIES.len()];
    let case = random::case(seed, entry, random::CaseOptions::WILD);
    let policy = entry.build(&case.params).unwrap();
    let mut engine = Engine::new(&case.cluster, case.costs, policy, Box::new(Undisturbed), seed);
    for profile in &case.profiles {
        engine.add_profile(profile.clone());
    }
    let mut facts: Vec<Event> = Vec::new();
    for (i, job) in case.jobs.iter().enumerate() {
        let job = engine.add_job(job.spec.clone());
        facts.push(Event::Submitted(job));
        let step = engine.step(Time::from_secs(i as f64), &facts);
        facts = step
            .actions
            .iter()
            .filter_map(|a| match a {
                Action::Start(j, _) if j.0 % 3 > 0 => Some(Event::Started(*j)),
                _ => None,
            })
            .collect();
    }
    let mut state = engine.state().clone();
    state.now += Span(2_500_000);
    state
}

#[test]
fn undo_restores_the_state_exactly() {
    let mut draft = Draft::default();
    for seed in 0..4_000 {
        let mut state = some_state(seed);
        let (original, mut rng, mut own) = (state.clone(), Rng::new(seed), Rng::new(0));
        let news = News { events: &[], ready: &[], left: &[] };
        // The draft is reused from plan to plan as in an engine, but every state has its own jobs.
        if seed % 2 == 0 {
            draft = Draft::default();
        }
        let mut plan = Plan::new(&mut state, &mut draft, news, &Undisturbed, &mut own);
        let start = plan.mark();
        if let Err(Broken(law, how)) = scribble(&mut plan, &mut rng, 2) {
            panic!("seed {seed} {law:?}: {how}");
        }
        plan.undo_to(start);
        assert!(*plan == original, "seed {seed}: undo did not restore the plan");
    }
}

/// A policy that makes random edits and undoes them before it decides.
struct Hesitant(Box<dyn Policy>, Rng);

impl Policy for Hesitant {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let mark = plan.mark();
        scribble(plan, &mut self.1, 1).unwrap_or_else(|Broken(_, how)| panic!("{how}"));
        plan.undo_to(mark);
        self.0.schedule(plan);
    }

    fn asks_again(&self) -> bool {
        self.0.asks_again()
    }
}

#[test]
fn what_was_undone_leaves_no_trace_in_the_journal() {
    let hesitant: Build<'_> =
        &|faulty_run| Box::new(Hesitant(from_registry(faulty_run), Rng::new(faulty_run.case.seed)));
    for entry in POLICIES {
        for seed in 0..150 {
            let faulty_run = FaultyRun::random(seed, entry);
            let plain = play(&faulty_run, from_registry(&faulty_run), false);
            let undone = play(&faulty_run, hesitant(&faulty_run), false);
            let (plain, undone) = (plain.unwrap(), undone.unwrap());
            let difference = first_difference(&plain.journal, &undone.journal);
            assert!(plain.journal == undone.journal, "{faulty_run}{difference}");
        }
    }
}
