//! Formulas against the published values, their limits, and the errors of the released artifact.

use super::*;
use crate::math::rng::Rng;

/// The form of the released artifact, which multiplies by the efficiency.
fn flipped(alone_s: f64, step_s: f64, m0: f64, m: f64, phi: f64) -> f64 {
    step_s / alone_s * (m0 / m) * efficiency(m0, m, phi)
}

#[test]
fn degradation_has_the_published_values_not_the_flipped() {
    for (m, step_s, pd, wrong) in [
        (512.0, 0.100, 1.000_000, 1.000_000),
        (512.0, 0.150, 1.500_000, 1.500_000),
        (256.0, 0.070, 1.007_018, 1.946_341),
        (1024.0, 0.160, 1.249_123, 0.512_360),
        (2048.0, 0.301, 2.019_868, 0.280_343),
    ] {
        let found = degradation(0.1, step_s, 512.0, m, 400.0);
        assert!((found - pd).abs() < 1e-6, "{m}: {found}");
        assert!((flipped(0.1, step_s, 512.0, m, 400.0) - wrong).abs() < 1e-6);
    }
}

#[test]
fn degradation_keeps_its_limits() {
    let mut rng = Rng::stream(1, 100);
    for _ in 0..2_000 {
        let [alone_s, step_s] = [(); 2].map(|()| 0.01 + rng.unit());
        let [m0, m] = [(); 2].map(|()| (rng.unit() * 10.0).exp2().round());
        let phi = (rng.unit() * 14.0).exp2();
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
        let pd = |m: f64, phi: f64| degradation(alone_s, step_s, m0, m, phi);
        near(pd(m, 1e15), step_s / alone_s * m0 / m);
        near(pd(m, 0.0), step_s / alone_s);
        near(pd(m0, phi), step_s / alone_s);
        // It is the ratio of goodputs.
        let goodput = |m: f64, s: f64| m / s * efficiency(m0, m, phi);
        near(pd(m, phi), goodput(m0, alone_s) / goodput(m, step_s));
        // At a given step time a larger batch never harms, and helps at most in proportion.
        let double = pd(m, phi) / pd(2.0 * m, phi);
        assert!((1.0 - 1e-12..=2.0 + 1e-12).contains(&double), "{double}");
        // More noise makes larger batches more valuable.
        assert!(goodput_factor(m0, 2.0 * m0, phi) <= goodput_factor(m0, 2.0 * m0, 2.0 * phi));
    }
}

#[test]
fn noise_grows_in_stages_and_memory_in_lines() {
    let noise = Noise { start: 100.0, end: 1600.0 };
    assert_eq!((noise.at(0), noise.at(Noise::STAGES - 1)), (100.0, 1600.0));
    let stages: Vec<f32> = (0..Noise::STAGES).map(|s| noise.at(s)).collect();
    assert!(stages.is_sorted());
    assert_eq!((noise.stage(0.0), noise.stage(0.5), noise.stage(1.0)), (0, 10, 19));
    assert_eq!(Noise::constant(7.0).at(Noise::constant(7.0).stage(0.0)), 7.0);
    assert_eq!(Noise { start: 0.0, end: 19.0 }.at(1), 1.0);

    let memory = vec![(64, 1_000), (128, 1_640), (256, 3_000)];
    let training = Training { memory, ..Training::around(128, 1.0) };
    let at = |b| training.mem_mib(b).unwrap();
    assert_eq!([64, 96, 128, 256, 512, 32].map(at), [1_000, 1_320, 1_640, 3_000, 5_720, 680]);
    assert_eq!(Training::around(128, 1.0).mem_mib(64), None);
    let one = Training { memory: vec![(64, 9)], ..Training::around(64, 1.0) };
    assert_eq!(one.mem_mib(4096), Some(9));
}

#[test]
fn batches_below_one_do_not_exist() {
    // The artifact probed m0 − 48 … m0 + 16: nothing or less for BERT (8), AD-GCL and YOLOv5 (32).
    for batch in [1, 2, 3, 8, 32, u32::MAX] {
        let training = Training::around(batch, 1.0);
        assert!(training.is_sane() && training.batch_min >= 1, "{training:?}");
    }
    assert!(!Training { batch_min: 0, ..Training::around(8, 1.0) }.is_sane());
    assert!(!Training { batch_max: 4, ..Training::around(8, 1.0) }.is_sane());
}

/// Memory that grows in proportion above a constant, measured with little noise.
fn line(rng: &mut Rng) -> (f64, f64) {
    (200.0 + 8_000.0 * rng.unit(), 0.5 + 40.0 * rng.unit())
}

#[test]
fn later_samples_lie_within_the_band_of_a_memory_fit() {
    let mut rng = Rng::stream(3, 100);
    let (mut asked, mut exceeded, mut slack, mut inner) = (0, 0, 0.0, 0);
    for _ in 0..400 {
        let (fixed, each) = line(&mut rng);
        let noise = 0.01 * rng.unit();
        let mut fit = MemoryFit::default();
        let truth = |b: u32| fixed + each * f64::from(b);
        for step in 0..5 {
            let seen = 16u32 << rng.below(5);
            let measured = truth(seen) * (1.0 + noise * rng.normal());
            fit.observe(seen, measured.round() as u32);
            for batch in [8u32, 24, 100, 256, 700, 1024] {
                let upper = f64::from(fit.upper_mib(batch).unwrap());
                let really = truth(batch) * (1.0 + noise * rng.normal());
                asked += 1;
                exceeded += u32::from(really > upper);
                let inside = fit.seen[0].0 < batch && batch < fit.seen[fit.seen.len() - 1].0;
                if step == 4 && inside {
                    (slack, inner) = (slack + upper / really - 1.0, inner + 1);
                }
            }
        }
    }
    assert!(f64::from(exceeded) < 0.02 * f64::from(asked), "{exceeded} of {asked}");
    let slack = slack / f64::from(inner);
    assert!(inner > 500 && slack < 0.1, "a band of {slack} prunes too much");
}

#[test]
fn without_noise_memory_is_never_exceeded() {
    let mut rng = Rng::stream(4, 100);
    for _ in 0..1_000 {
        let (fixed, each) = line(&mut rng);
        let truth = |b: u32| (fixed + each * f64::from(b)).round() as u32;
        let mut fit = MemoryFit::default();
        assert_eq!((fit.upper_mib(8), fit.is_known()), (None, false));
        for _ in 0..4 {
            let seen = 1 + rng.below(2_000) as u32;
            fit.observe(seen, truth(seen));
            for _ in 0..20 {
                let batch = 1 + rng.below(8_000) as u32;
                assert!(fit.upper_mib(batch).unwrap() >= truth(batch), "{fit:?} {batch}");
            }
        }
        // Between points the band is as narrow as allowed.
        let (first, last) = (fit.seen[0].0, fit.seen[fit.seen.len() - 1].0);
        let middle = first.midpoint(last);
        let upper = f64::from(fit.upper_mib(middle).unwrap());
        assert!(upper < 1.06 * f64::from(truth(middle)) || fit.seen.len() < 2, "{fit:?} {upper}");
    }
}

#[test]
fn memory_that_begins_to_grow_is_expected_to() {
    // Measured: flat up to 512, then growing. A line through the first two points would stay at
    // 1048.
    let really = |b: u32| if b <= 512 { 1_048 } else { 1_048 + (b - 512) * 7 / 16 };
    let mut fit = MemoryFit::default();
    for seen in [128, 512, 1_117, 2_000] {
        fit.observe(seen, really(seen));
        for batch in (64..4_096).step_by(37) {
            assert!(fit.upper_mib(batch).unwrap() >= really(batch), "{seen} {batch}");
        }
    }
}
