/** For tests of programs that use the library: `import { createTestIntake } from 'spillway/testing'`. */
export { createTestIntake, type TestIntake, type TestIntakeOptions } from './test-intake.js'
