use crate::policy::serving::testing::ServingWorld;
use crate::testing::picture;
use expect_test::expect;

#[test]
fn without_services_training_shares_idle_gpus() {
    let jobs = "a 0 1 4, b 0 1 6, c 1 2 3, d 2 1 3";
    expect![[r#"
        gpu0  a#########d
        gpu1  b#########b
    "#]]
    .assert_eq(&picture("mudi", "1x2", jobs));
}

#[test]
fn shares_and_batches_follow_training_and_load() {
    let mut world = ServingWorld::new("mudi", "{}", "1x1");
    let service = world.service("service", 150);
    world.says("the service starts");
    world.sampled(service, 200.0, 30.0);
    world.says("the service answers");
    world.train("training", 0.8, 0.3);
    world.says("training comes");
    world.wait(300.0);
    world.says("the search is over");
    world.sampled(service, 250.0, 60.0);
    world.says("a little more load");
    world.sampled(service, 900.0, 200.0);
    world.says("much more load");
    world.wait(300.0);
    world.sampled(service, 100.0, 20.0);
    world.says("little load");
    world.wait(300.0);
    world.says("five minutes later");
    expect![[r#"
        the service starts, 0.0s
          service its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          GPU 0: service 1000 ‰
        the service answers, 1.0s
          GPU 0: service 1000 ‰ batch 16
        training comes, 1.0s
          GPU 0: service 240 ‰ batch 16 training 760 ‰
        the search is over, 5m 01s
          GPU 0: service 240 ‰ batch 16 training 760 ‰
        a little more load, 5m 02s
          GPU 0: service 240 ‰ batch 16 training 760 ‰
        much more load, 5m 03s
          training suspended in host memory: service service would miss its SLO beside it
          GPU 0: service 1000 ‰ batch 64
          waiting: training
        little load, 10m 04s
          GPU 0: service 132 ‰ batch 16 training 868 ‰
        five minutes later, 15m 04s
          GPU 0: service 132 ‰ batch 16 training 868 ‰
    "#]].assert_eq(&world.outcome);
}

#[test]
fn a_miss_at_a_known_load_raises_the_share() {
    let params = r#"{"round_s": 0, "calm_s": 0, "batches": [16]}"#;
    let mut world = ServingWorld::new("mudi", params, "1x1");
    let service = world.service("service", 150);
    world.sampled(service, 200.0, 30.0);
    world.train("training", 0.8, 0.3);
    let mut share = |p99_ms: f64| {
        world.sampled(service, 200.0, p99_ms);
        world.wait(1.0);
        world.engine.state().job(service).knobs.sm_permille
    };
    let kept = (0..3).map(|_| share(140.0)).last().unwrap();
    // Batch times are unchanged; only the latency shows that the model is too optimistic.
    let missed = (0..3).map(|_| share(160.0)).last().unwrap();
    assert!(missed > kept, "{kept} ‰, then {missed} ‰");
}

#[test]
fn training_is_suspended_where_the_slo_would_be_missed() {
    let mut world = ServingWorld::new("mudi", r#"{"max_training": 1}"#, "1x2");
    let (a, b) = (world.service("a", 150), world.service("b", 150));
    world.sampled(a, 200.0, 30.0);
    world.sampled(b, 200.0, 30.0);
    world.train("x", 0.8, 0.3);
    world.train("y", 0.8, 0.3);
    world.wait(100.0);
    world.says("both share with training");
    world.sampled(a, 900.0, 140.0);
    world.says("a has a high load");
    world.wait(100.0);
    world.sampled(a, 200.0, 30.0);
    world.says("a has its usual load");
    expect![[r#"
        both share with training, 1m 42s
          a its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          b its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          GPU 0: a 240 ‰ batch 16 x 760 ‰
          GPU 1: b 240 ‰ batch 16 y 760 ‰
        a has a high load, 1m 43s
          x suspended in host memory: service a would miss its SLO beside it
          GPU 0: a 1000 ‰ batch 64
          GPU 1: b 240 ‰ batch 16 y 760 ‰
          waiting: x
        a has its usual load, 3m 24s
          GPU 0: a 165 ‰ batch 16 x 835 ‰
          GPU 1: b 240 ‰ batch 16 y 760 ‰
    "#]].assert_eq(&world.outcome);
}

#[test]
fn an_slo_out_of_reach_does_not_stop_training() {
    let mut world = ServingWorld::new("mudi", "{}", "1x1");
    let service = world.service("service", 5);
    world.sampled(service, 200.0, 30.0);
    world.says("alone");
    world.train("training", 0.8, 0.3);
    world.says("beside training");
    world.wait(3600.0);
    expect![[r#"
        alone, 1.0s
          service its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          service misses its SLO even with the whole GPU; it has all but the minimum share of training
          GPU 0: service 1000 ‰ batch 4
        beside training, 1.0s
          GPU 0: service 900 ‰ batch 4 training 100 ‰
    "#]].assert_eq(&world.outcome);
}

#[test]
fn services_without_requests_and_without_samples() {
    let mut world = ServingWorld::new("mudi", "{}", "1x2");
    let idle = world.service("idle", 150);
    world.service("silent", 150);
    world.sampled(idle, 1e-6, 0.0);
    world.train("x", 0.8, 0.3);
    world.train("y", 0.8, 0.3);
    world.wait(3600.0);
    world.says("an hour later");
    expect![[r#"
        an hour later, 1h 00m
          idle its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          silent its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          idle receives no requests; it has the minimum share until one comes
          silent has not reported a request yet; its share is a first guess until it does
          GPU 0: idle 56 ‰ batch 1 x 944 ‰
          GPU 1: silent 480 ‰ y 520 ‰
    "#]].assert_eq(&world.outcome);
}

#[test]
fn without_profiled_points_the_share_shrinks_with_samples() {
    let mut world = ServingWorld::new("mudi", "{}", "1x1");
    let service = world.service_with("service", 150, vec![]);
    world.train("training", 0.8, 0.3);
    world.says("nothing is known");
    world.sampled(service, 100.0, 30.0);
    world.says("the service answers");
    for _ in 0..6 {
        world.wait(100.0);
        world.sampled(service, 100.0, 40.0);
    }
    world.says("after six measurements");
    expect![[r#"
        nothing is known, 0.0s
          service its latency was not profiled: assumed to double with half of the GPU
          service has not reported a request yet; its share is a first guess until it does
          GPU 0: service 900 ‰ training 100 ‰
        the service answers, 1.0s
          GPU 0: service 388 ‰ batch 16 training 612 ‰
        after six measurements, 10m 07s
          GPU 0: service 163 ‰ batch 16 training 837 ‰
    "#]]
    .assert_eq(&world.outcome);
}

#[test]
fn training_gives_memory_to_larger_batches_and_gets_it_back() {
    let params = r#"{"batches": [64], "round_s": 0.0, "calm_s": 0.0}"#;
    let mut world = ServingWorld::new("mudi", params, "1x1:v100");
    let service = world.service("service", 300);
    world.train_with("training", 0.8, 0.3, 15_200);
    world.says("as requested");
    world.sampled(service, 100.0, 30.0);
    world.says("with batches of 64");
    expect![[r#"
        as requested, 0.0s
          service its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          service has not reported a request yet; its share is a first guess until it does
          GPU 0: service 480 ‰ training 520 ‰ 15200 MiB
        with batches of 64, 1.0s
          GPU 0: service 215 ‰ batch 64 training 785 ‰ 14744 MiB
    "#]].assert_eq(&world.outcome);
}

#[test]
fn up_to_three_training_tasks_share_the_rest_equally() {
    let mut world = ServingWorld::new("mudi", r#"{"max_training": 3}"#, "1x2");
    let (a, b) = (world.service("a", 150), world.service("b", 150));
    world.sampled(a, 200.0, 30.0);
    world.sampled(b, 50.0, 30.0);
    let first = world.train("t1", 0.8, 0.3);
    for name in ["t2", "t3", "t4", "t5"] {
        world.train(name, 0.4, 0.1);
    }
    world.wait(600.0);
    world.says("five training tasks");
    world.ends(first);
    world.wait(600.0);
    world.says("one has ended");
    expect![[r#"
        five training tasks, 10m 02s
          a its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          b its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          GPU 0: a 240 ‰ batch 16 t1 253 ‰ t3 253 ‰ t5 253 ‰
          GPU 1: b 76 ‰ batch 4 t2 462 ‰ t4 462 ‰
        one has ended, 20m 02s
          GPU 0: a 240 ‰ batch 16 t3 380 ‰ t5 380 ‰
          GPU 1: b 76 ‰ batch 4 t2 462 ‰ t4 462 ‰
    "#]].assert_eq(&world.outcome);
}

#[test]
fn as_published_the_search_is_at_the_knee() {
    let mut world = ServingWorld::new("mudi-published", "{}", "1x1");
    let service = world.service("service", 150);
    world.sampled(service, 60.0, 30.0);
    world.train("training", 0.8, 0.3);
    world.says("training comes");
    world.wait(300.0);
    world.says("the search is over");
    expect![[r#"
        training comes, 1.0s
          service its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          GPU 0: service 300 ‰ batch 16 training 700 ‰
        the search is over, 5m 01s
          GPU 0: service 189 ‰ batch 16 training 811 ‰
    "#]].assert_eq(&world.outcome);
}

#[test]
fn trials_against_a_prediction_become_rarer_until_one_succeeds() {
    let mut world = ServingWorld::new("mudi", r#"{"max_training": 1}"#, "1x1");
    let service = world.service("service", 150);
    world.sampled(service, 900.0, 100.0);
    world.train("training", 0.8, 0.3);
    world.says("predicted to miss its SLO");
    world.wait(301.0);
    world.says("tried");
    world.sampled_slow(service, 900.0, 200.0, 2.0);
    world.says("the SLO was missed");
    world.wait(590.0);
    world.says("not yet tried again");
    world.wait(20.0);
    world.says("tried again");
    world.sampled_slow(service, 900.0, 140.0, 2.0);
    world.wait(3600.0);
    world.says("the SLO is met");
    expect![[r#"
        predicted to miss its SLO, 1.0s
          service its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
          training does not fit: needs 1 GPUs, 0 idle in the cluster
          GPU 0: service 1000 ‰ batch 64
          waiting: training
        tried, 5m 02s
          training is tried beside job service on the same GPUs
          GPU 0: service 900 ‰ batch 64 training 100 ‰
        the SLO was missed, 5m 03s
          training suspended in host memory: service service would miss its SLO beside it
          GPU 0: service 1000 ‰ batch 64
          waiting: training
        not yet tried again, 14m 53s
          GPU 0: service 1000 ‰ batch 64
          waiting: training
        tried again, 15m 13s
          training is tried beside job service on the same GPUs
          GPU 0: service 900 ‰ batch 64 training 100 ‰
        the SLO is met, 1h 15m
          GPU 0: service 900 ‰ batch 64 training 100 ‰
    "#]].assert_eq(&world.outcome);
}
