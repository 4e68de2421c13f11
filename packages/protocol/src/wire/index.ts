export * from './codes.js'
export * from './limits.js'
export * from './operations.js'
export * from './problem.js'
