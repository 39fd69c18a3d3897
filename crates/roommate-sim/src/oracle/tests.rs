use super::*;
use roommate_core::math::rng::Rng;

/// The same search space without bound, symmetry breaking and ordering.
fn naive(puzzle: &Puzzle, now: f64, left: &[f64], seats: &[Option<usize>], sum: f64) -> f64 {
    let n = puzzle.tasks.len();
    if left.iter().all(|l| *l <= 0.0) {
        return sum;
    }
    let free: Vec<usize> =
        (0..n).filter(|i| seats[*i].is_none() && puzzle.tasks[*i].0 <= now).collect();
    let choices = puzzle.gpus.len() + 1;
    let mut best = f64::INFINITY;
    for code in 0..choices.pow(free.len() as u32) {
        let mut seats = seats.to_vec();
        for (place, task) in free.iter().enumerate() {
            let gpu = code / choices.pow(place as u32) % choices;
            seats[*task] = (gpu > 0).then(|| gpu - 1);
        }
        let here = |i: usize, gpu: usize| seats[i] == Some(gpu) && left[i] > 0.0;
        let group = |gpu: usize| (0..n).filter(|i| here(*i, gpu)).map(|i| 1 << i).sum::<Group>();
        let groups: Vec<Group> = (0..puzzle.gpus.len()).map(group).collect();
        let settings: Option<Vec<Vec<Vec<f64>>>> = groups
            .iter()
            .zip(&puzzle.gpus)
            .map(
                |(g, k)| {
                    if *g == 0 { Some(vec![vec![]]) } else { puzzle.kinds[*k].get(g).cloned() }
                },
            )
            .collect();
        let Some(settings) = settings else { continue };
        let all: usize = settings.iter().map(Vec::len).product();
        for mut code in 0..all {
            let mut speeds = vec![0.0; n];
            for (group, options) in groups.iter().zip(&settings) {
                let option = &options[code % options.len()];
                code /= options.len();
                members(*group).zip(option).for_each(|(task, speed)| speeds[task] = *speed);
            }
            let ends = (0..n).filter(|i| speeds[*i] > 0.0).map(|i| now + left[i] / speeds[i]);
            let comes = puzzle.tasks.iter().map(|t| t.0).filter(|at| *at > now);
            let next = ends.chain(comes).fold(f64::INFINITY, f64::min);
            if next.is_infinite() {
                continue;
            }
            let mut after = left.to_vec();
            let mut done = sum;
            for i in (0..n).filter(|i| speeds[*i] > 0.0) {
                after[i] -= speeds[i] * (next - now);
                if after[i] < 1e-7 {
                    after[i] = 0.0;
                    done += next - puzzle.tasks[i].0;
                }
            }
            best = best.min(naive(puzzle, next, &after, &seats, done));
        }
    }
    best
}

fn random(seed: u64) -> Puzzle {
    let mut rng = Rng::stream(seed, 133);
    let tasks = 2 + rng.below(2) as usize;
    let kinds = 1 + rng.below(2) as usize;
    let mut options = || {
        let mut options = Options::new();
        for group in 1..1u32 << tasks {
            let size = group.count_ones() as usize;
            // Some groups do not fit together.
            if size == 1 || (size == 2 && rng.chance(0.8)) {
                let settings = 1 + rng.below(3);
                let speed = |rng: &mut Rng| (1 + rng.below(10)) as f64 / 8.0 / size as f64;
                let setting = |rng: &mut Rng| (0..size).map(|_| speed(rng)).collect();
                options.insert(group, (0..settings).map(|_| setting(&mut rng)).collect());
            }
        }
        options
    };
    let kinds: Vec<Options> = (0..kinds).map(|_| options()).collect();
    let mut rng = Rng::stream(seed, 134);
    Puzzle {
        tasks: (0..tasks).map(|_| (rng.below(4) as f64, (1 + rng.below(9)) as f64)).collect(),
        gpus: (0..2).map(|_| rng.below(kinds.len() as u64) as usize).collect(),
        kinds,
    }
}

#[test]
fn optimum_equals_exhaustive_search() {
    let mut shared = 0;
    for seed in 0..300 {
        let mut puzzle = random(seed);
        let n = puzzle.tasks.len();
        let left: Vec<f64> = puzzle.tasks.iter().map(|t| t.1).collect();
        puzzle.prune();
        let plain = naive(&puzzle, 0.0, &left, &vec![None; n], 0.0) / n as f64;
        let found = puzzle.solve().unwrap().mean_completion_s;
        assert!((found - plain).abs() < 1e-6, "seed {seed}: {found} instead of {plain}");
        shared += usize::from(puzzle.gpus.len() < n);
    }
    assert!(shared > 50, "only {shared} cases in which a task must share or wait");
}

#[test]
fn dominated_settings_are_pruned() {
    let options = vec![vec![0.5, 0.5], vec![0.6, 0.4], vec![0.4, 0.4], vec![0.5, 0.5]];
    let kinds = vec![Options::from([(0b11, options)])];
    let mut puzzle = Puzzle { tasks: vec![(0.0, 1.0); 2], kinds, gpus: vec![0] };
    puzzle.prune();
    assert_eq!(puzzle.kinds[0][&0b11], [vec![0.5, 0.5], vec![0.6, 0.4]]);
}

#[test]
fn waiting_can_be_optimal() {
    // Together each task has a quarter of its speed; running one after the other is better.
    let alone = vec![vec![1.0]];
    let kinds =
        vec![Options::from([(0b01, alone.clone()), (0b10, alone), (0b11, vec![vec![0.25; 2]])])];
    let puzzle = Puzzle { tasks: vec![(0.0, 10.0), (0.0, 10.0)], kinds, gpus: vec![0] };
    let best = puzzle.solve().unwrap();
    assert_eq!((best.mean_completion_s, best.makespan_s), (15.0, 20.0));
}

#[test]
fn a_task_that_fits_nowhere_is_infeasible() {
    let kinds = vec![Options::from([(0b01, vec![vec![1.0]])])];
    let puzzle = Puzzle { tasks: vec![(0.0, 1.0); 2], kinds, gpus: vec![0] };
    assert_eq!(puzzle.solve(), Err(Unsolved::Infeasible));
}
