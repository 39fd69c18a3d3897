use super::*;
use crate::math::rng::Rng;
use crate::measurement::rows;

/// Measurements on an H200.
pub(crate) fn h200() -> Atlas {
    let solo = rows::parse(include_str!("../../../../../profiles/h200.jsonl")).unwrap();
    let pairs = rows::parse(include_str!("../../../../../profiles/h200-pairs.jsonl")).unwrap();
    Atlas::new(&[solo, pairs]).unwrap()
}

#[test]
fn what_was_measured_is_answered_exactly() {
    let atlas = h200();
    let vit = atlas.task(TaskKind::Train, "vit-b16-imagenet").unwrap();
    assert_eq!(atlas.batches(vit).collect::<Vec<_>>(), [32, 64, 128]);
    assert!((atlas.steps_per_s(vit, 128) - 17.019).abs() < 1e-9);
    assert!((atlas.kept(vit, 128, 80) - 11.91 / 17.019).abs() < 1e-12);
    let seen = atlas.counters(vit, 128);
    assert_eq!((seen.sm_util, seen.dram_util, seen.mem_mib), (87.05 / 100.0, 42.58 / 100.0, 10244));
    // The faster of two solo runs: 29.562 beside 26.616.
    let gpt2 = atlas.task(TaskKind::Train, "gpt2-lm").unwrap();
    assert!((atlas.steps_per_s(gpt2, 8) - 29.562).abs() < 1e-9);
    assert_eq!((atlas.sms(), atlas.tasks().count()), (132, 18));
}

#[test]
fn every_question_has_a_sane_answer() {
    let atlas = h200();
    let batches = (0..=100_000).step_by(37).chain(1..100);
    for (task, _, name) in atlas.tasks() {
        for batch in batches.clone() {
            let seen = atlas.counters(task, batch);
            assert!((0.0..=1.0).contains(&seen.sm_util), "{name}@{batch} {seen:?}");
            assert!((0.0..=1.0).contains(&seen.dram_util) && seen.mem_mib > 500, "{name}@{batch}");
            let it_s = atlas.steps_per_s(task, batch);
            assert!(it_s.is_finite() && it_s > 0.0, "{name}@{batch} {it_s}");
        }
        for batch in [0, 1, 3, 16, 100, 513, 5_000, 100_000] {
            let kept: Vec<f64> = (1..=132).map(|sms| atlas.kept(task, batch, sms)).collect();
            assert!(
                kept.is_sorted() && kept[0] > 0.0 && kept[131] == 1.0,
                "{name}@{batch} {kept:?}"
            );
        }
    }
}

#[test]
fn more_roommates_never_help() {
    let atlas = h200();
    let tasks: Vec<TaskId> = atlas.tasks().map(|t| t.0).collect();
    let mut rng = Rng::new(5);
    for _ in 0..3_000 {
        let tenants: Vec<Tenant> = (0..4)
            .map(|_| {
                let task = tasks[rng.below(tasks.len() as u64) as usize];
                let batches: Vec<u32> = atlas.batches(task).collect();
                let sms = rng.chance(0.5).then(|| 1 + rng.below(132) as u32);
                let batch = batches[rng.below(batches.len() as u64) as usize];
                Tenant { sms, load: rng.unit(), ..Tenant::plain(task, batch) }
            })
            .collect();
        let speeds: Vec<f64> = (1..=4).map(|n| atlas.speed(&tenants[..n], 0)).collect();
        assert!(speeds.is_sorted_by(|a, b| a >= b), "{tenants:?} {speeds:?}");
        assert!(speeds.iter().all(|s| *s > 0.0 && *s <= 1.0), "{tenants:?} {speeds:?}");
    }
}

#[test]
fn a_third_tenant_never_helps_a_measured_pair() {
    let atlas = h200();
    let tenant = |s: Seat, load| Tenant { sms: s.sms, load, ..Tenant::plain(s.task, s.batch) };
    assert!(atlas.met.len() > 180);
    for ((a, b), met) in &atlas.met {
        let (a, b) = (tenant(*a, 1.0), tenant(*b, met.load));
        let speeds = [2, 3, 4].map(|n| atlas.speed(&[a, b, b, b][..n], 0));
        assert!((speeds[0] - (met.sum / f64::from(met.runs)).min(1.0)).abs() < 1e-9, "{a:?} {b:?}");
        assert!(speeds.is_sorted_by(|a, b| a >= b) && speeds[2] > 0.02, "{a:?} {b:?} {speeds:?}");
    }
}

#[test]
fn the_model_predicts_what_it_has_not_seen() {
    let validation = h200().validate();
    let unseen = validation.unseen_tasks;
    assert_eq!((unseen.tt.sides, validation.unseen_pairs.all.sides), (182, 196));
    for (what, errors, limit) in [
        ("tt", unseen.tt, 0.08),
        ("ts", unseen.ts, 0.08),
        ("tt of known tasks", validation.unseen_pairs.tt, 0.06),
    ] {
        assert!(errors.mae < limit, "{what} {errors:?}");
    }
}

#[test]
fn a_check_compares_known_pairs_and_skips_unknown_tasks() {
    let atlas = h200();
    let text = include_str!("../../../../../profiles/h200-pairs.jsonl");
    let check = atlas.check(&rows::parse(text).unwrap());
    assert_eq!((check.pairs, check.skipped, check.answers.all.sides), (148, 0, 196));
    // Measured pairs are answered as measured, except that no task runs faster than alone, and that
    // the two sides of a task beside itself are one.
    assert!((check.answers.all.mae - atlas.noise().above_one.mae).abs() < 1e-3, "{check:?}");
    assert!(check.model.all.mae > check.answers.all.mae);
    let strange = text.replace("gpt2-lm", "gpt5-lm");
    let check = atlas.check(&rows::parse(&strange).unwrap());
    assert!(check.skipped > 0 && check.unknown.contains("gpt5-lm"));
    assert_eq!(Atlas::new(&[rows::parse(text).unwrap()]), Err(Empty));
}

#[test]
fn confined_pairs_are_answered_as_measured_but_not_fitted() {
    let solo = |name: &str, sms: u32, it_s: f64| {
        format!(
            r#"{{"kind":"train","name":"{name}","batch":8,"sms":{sms},"mem_mib":900,"it_s":{it_s}}}{}"#,
            "\n"
        )
    };
    let pair = |it_s: f64, more: &str| {
        format!(
            r#"{{"k":"tt","a":"x","batch_a":8,"b":"y","batch_b":8{more},"ra":{{"it_s":{it_s}}},"rb":{{"it_s":5}}}}{}"#,
            "\n"
        )
    };
    let alone = solo("x", 132, 10.0) + &solo("x", 64, 8.0) + &solo("y", 132, 10.0);
    let rows = rows::parse(&(alone + &pair(6.0, "") + &pair(7.5, r#","sms_a":64,"sms_b":68"#)));
    // Rows without counters: the tasks are known, but the model is not fitted to them.
    let atlas = Atlas::new(&[rows.unwrap()]).unwrap();
    assert_eq!((atlas.tasks().count(), atlas.pairs()), (2, 0));
    let x = atlas.training("x", 8, None).unwrap();
    let y = atlas.training("y", 8, None).unwrap();
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
    close(atlas.speed(&[x, y], 0), 0.6);
    let parts = [Tenant { sms: Some(64), ..x }, Tenant { sms: Some(68), ..y }];
    close(atlas.speed(&parts, 0), 0.75);
    close(atlas.speed(&parts, 1), 0.5);
    assert_eq!(atlas.footprint(x.task, 8).sm, 1.0);
}
